// Package options is what the command line of the agent says: the flags of the
// older agents and our own, and the config that they name. It exists because the
// daemon and the commands must read both alike: a command takes the flags of the
// agent that runs.
//
// A flag that the agents of the iptables generation take, klog's among them, is
// taken here too, with the same types and defaults.
package options
