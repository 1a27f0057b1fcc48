// Package running is how commands and the agent talk: an agent answers on its unix socket with a
// [Report], and one agent has a lock in each network namespace. Commands find the agent by both, and
// answer for it.
package running
