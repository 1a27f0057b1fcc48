package config

import (
	"fmt"
	"net/netip"
	"strings"
)

// An Interface is the name of a network interface in a config file, or, with a
// trailing "*", a prefix of names.
type Interface struct {
	Name string
	Pos  Position
}

// Prefix returns the name without its "*", and whether it has one.
func (i Interface) Prefix() (string, bool) { return strings.CutSuffix(i.Name, "*") }

// Matches reports whether i covers an interface of that name.
func (i Interface) Matches(name string) bool {
	if prefix, ok := i.Prefix(); ok {
		return strings.HasPrefix(name, prefix)
	}
	return i.Name == name
}

// Bounds of a list of interfaces: IFNAMSIZ without the terminating zero, and how
// many names one rule can compare (NFT_RULE_MAXEXPRS is 128, and each name takes
// two expressions).
const (
	maxInterface  = 15
	maxInterfaces = 50
)

// parseInterface returns what is wrong with a name, or "": what the kernel
// forbids (dev_valid_name), and what cannot be written in a rule.
func parseInterface(s string) (_ netip.Prefix, msg string) {
	switch {
	case s == "*":
		msg = `"*" means every interface: leave the key out`
	case len(s) > maxInterface:
		msg = fmt.Sprintf("%s has %d bytes, the name of an interface has at most %d", quote(s), len(s), maxInterface)
	case s == "", s == ".", s == "..", !quotable(s), strings.ContainsAny(s, `/:"\ `):
		msg = quote(s) + ` is not the name of an interface: no "/", ":", quotes, backslashes, spaces or control characters`
	case strings.Contains(strings.TrimSuffix(s, "*"), "*"):
		msg = quote(s) + `: a "*" can only be the last character, for all names that begin so`
	}
	return netip.Prefix{}, msg
}
