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
	case slices.Contains(builtIn, name):
		return fmt.Errorf("chain name %q: is a built-in chain or target of iptables", name)
	}
	return nil
}

// builtIn are the built-in chains and targets, and the extension that our rules use.
var builtIn = []string{
	"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING", "ACCEPT", "DROP", "RETURN", "QUEUE", "MASQUERADE",
}
