// Package agent is the daemon's loop: it applies the config to the kernel
// whenever one of them changes. It exists so that all that the daemon decides is
// decided on one goroutine, whose files, kernel and clock a test can replace.
//
// The loop never ends by itself and never deletes anything: a config that is
// bad, or a kernel that refuses, leaves the rules as they are. Each event
// leads to a decision (decide), to [Agent.sync], which applies it, and to a report.
package agent
