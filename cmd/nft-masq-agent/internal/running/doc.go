// Package running finds the agents that run in this network namespace, in a procfs,
// and asks them how they are. It exists so that a command without flags answers for
// the agent that runs, and so that agent and commands share what it reports.
package running
