// Package agent is the daemon: a loop that applies the config to the kernel whenever one
// of them changes, and observers. It exists so that one goroutine makes all decisions of
// the daemon, and a test can replace its files, kernel and clock.
//
// Each event leads from one view to the next: nextPolicy chooses the policy, the kernel gets
// it, and the log is the difference of the two views. The loop never ends by itself and
// never deletes anything: if the config or the kernel rejects a policy, the rules stay as
// they are. At a start without a config the defaults apply at once, as with the older agents, whatever a
// previous run left.
// Observers read the published view, on goroutines of their own.
package agent
