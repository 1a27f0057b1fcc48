// Package running finds the agents that run beside this process, in a procfs, so
// that a command can take the flags that a running agent has.
package running
