package xtables

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// maxChainName is the longest name of a chain, in bytes: XT_EXTENSION_MAXNAMELEN is 29 with the NUL.
const maxChainName = 28

// CheckChain returns an error if iptables does not accept a name for a
// user-defined chain, or cannot load what it saves of it. iptables compares names
// case-sensitively.
func CheckChain(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("chain name %q: is empty", name)
	case len(name) > maxChainName:
		return fmt.Errorf("chain name %q: has %d characters, iptables takes at most %d", name, len(name), maxChainName)
	case name[0] == '-' || name[0] == '!':
		return fmt.Errorf("chain name %q: begins with %q", name, name[0])
	case strings.ContainsFunc(name, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }):
		return fmt.Errorf("chain name %q: has white space or a character that does not print", name)
	case strings.ContainsAny(name, `"'\`):
		return fmt.Errorf("chain name %q: has a quote or a backslash", name)
	case slices.Contains(builtInChains(), name):
		return fmt.Errorf("chain name %q: is a built-in chain", name)
	case slices.Contains(builtInTargets(), name):
		return fmt.Errorf("chain name %q: is a target of iptables", name)
	}
	return nil
}

func builtInChains() []string {
	return []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
}

// builtInTargets lists the targets of iptables 1.8.9, including its extensions,
// and those of older kernels.
func builtInTargets() []string {
	return []string{
		"ACCEPT", "DROP", "RETURN", "QUEUE",
		"AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK", "CT", "DNAT", "DNPT", "DSCP",
		"ECN", "ERROR", "HL", "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MASQUERADE", "MIRROR", "NETMAP", "NFLOG",
		"NFQUEUE", "NOTRACK", "RATEEST", "REDIRECT", "REJECT", "SAME", "SECMARK", "SET", "SNAT", "SNPT", "SYNPROXY",
		"TARPIT", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TPROXY", "TRACE", "TTL", "ULOG",
	}
}
