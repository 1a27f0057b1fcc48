// Package cli is the command line: the flags of the older agents and our own, with the config that
// they name ([Options]), and what all answers have in common ([Head], text and JSON). The daemon and
// the commands parse flags alike, because a command uses the flags of the running agent.
//
// All flags of the iptables-based agents, including klog's, are accepted, with
// the same types and defaults.
package cli
