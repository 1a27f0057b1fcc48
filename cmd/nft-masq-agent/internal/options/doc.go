// Package options is what the command line of the agent says: the flags of the
// older agents and our own, and the config that they name.
//
// A flag that the agents of the iptables generation take, klog's among them, is
// taken here too, with the same types and defaults.
package options
