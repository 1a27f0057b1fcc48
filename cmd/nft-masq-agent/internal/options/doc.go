// Package options parses the command line of the agent: the flags of the older
// agents and our own, and the config that they name. It exists because the daemon
// and the commands must parse them alike: a command uses the flags of the running
// agent.
//
// All flags of the iptables-based agents, including klog's, are accepted, with
// the same types and defaults.
package options
