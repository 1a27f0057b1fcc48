// Package running finds the agent that runs here: by its unix socket, on which it
// answers with a [report.Report], or by the lock that one agent has in each network
// namespace. It exists so that a command answers for the agent that runs.
package running
