package config

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"gopkg.in/yaml.v3"
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

// checkInterface returns what is wrong with a name, or "": what the kernel
// forbids (dev_valid_name), and what cannot be written in a rule.
func checkInterface(s string) string {
	switch name := strings.TrimSuffix(s, "*"); {
	case s == "*":
		return `"*" means every interface: leave the key out`
	case s == "", s == ".", s == "..":
		return quote(s) + " is not the name of an interface"
	case len(s) > maxInterface:
		return fmt.Sprintf("%s has %d bytes, the name of an interface has at most %d", quote(s), len(s), maxInterface)
	case !utf8.ValidString(s), strings.ContainsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), strings.ContainsAny(s, `/:"\`):
		return quote(s) + ` is not the name of an interface: no "/", ":", quotes, backslashes, spaces or control characters`
	case strings.Contains(name, "*"):
		return quote(s) + `: a "*" can only be the last character, for all names that begin so`
	}
	return ""
}

// interfaces reads a list of names.
func (f *file) interfaces(key string) (list given) {
	for _, s := range f.settings[key] {
		var names []Interface
		entries, _ := f.entries(key, s.value, `"cni0", "veth*"`, checkInterface(s.value.Value))
		for _, item := range entries {
			n := target(item)
			if n.Kind != yaml.ScalarNode || isNull(n) {
				f.fail(item, "an entry of %s is %s, want the name of an interface", key, describe(n))
			} else if msg := checkInterface(n.Value); msg != "" {
				f.fail(item, "%s", msg)
			} else {
				names = append(names, Interface{n.Value, f.position(item)})
			}
		}
		if n := len(names); n > maxInterfaces {
			f.fail(s.value, "%s has %d names, at most %d are possible: use a prefix such as %q", key, n, maxInterfaces, "veth*")
		}
		list = given{names, s.key}
	}
	return list
}
