// Package agent is the daemon: a loop that applies the config to the kernel whenever one
// of them changes, and observers. It exists so that all that the daemon decides is decided
// on one goroutine, whose files, kernel and clock a test can replace.
//
// Each event leads from one view to another one: it is decided what to enforce (decide),
// that is applied, and the log is the difference of the two. The loop never ends by itself
// and never deletes anything: a config that is bad, or a kernel that refuses, leaves the
// rules as they are. Observers read the published view, on goroutines of their own.
package agent
