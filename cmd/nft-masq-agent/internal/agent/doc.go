// Package agent is the daemon's loop: it brings the kernel to what the config
// says, whenever one of the two has changed.
//
// The loop never ends by itself and never deletes anything: a config that is
// bad, or a kernel that refuses, leaves the rules as they are. What happens on
// which event stands in [Agent.sync] and the functions that call it.
package agent
