package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// maxName is the longest key, in bytes, that is compared with the known ones.
const maxName = 1024

// file is the content of one source.
type file struct {
	*text
	joined   bool // see Source
	defaults []CIDR
	keys     []string // the known keys
	folded   folds
	settings map[string][]setting // by known key, in the order in which they apply
	given    map[string]given     // by known key

	errors, warnings report
	ignored          bool // errors found now are ignored by the older agents
}

// given is the value of a key, of the type that its [Row] names, or a bool, and its
// node.
type given struct {
	value any
	at    *yaml.Node // nil if the file does not set the key
}

// setting is one occurrence of a known key, as spelled in the file.
type setting struct {
	name       string
	key, value *yaml.Node
}

func readFile(d Defaults, s Source, left *budget) *file {
	f := &file{
		text: newText(s), joined: s.Joined, defaults: Default(d).NonMasqueradeCIDRs, keys: Keys(),
		settings: map[string][]setting{}, given: map[string]given{},
	}
	var root *yaml.Node
	switch {
	case s.Ignored:
		f.warnings.add(Problem{
			Pos: at(f.name, 0, 0), Note: true,
			Msg: "not read: in a directory, only names that begin with ip-masq or end in .yaml, .yml or .json are read",
		}, maxWarnings)
	case strings.Count(f.s, "\n") > maxLines:
		f.tooMuch()
	case f.json:
		root = f.readJSON(left)
	default:
		root = f.readYAML(left)
	}
	if root == nil {
		return f
	}
	counted := aliases{lists: f.folded, sizes: map[*yaml.Node]int{}}
	if bad, msg := counted.check(root); bad != nil {
		f.fail(bad, "%s", msg)
	} else if root.Kind != yaml.MappingNode {
		f.fail(root, "the file contains %s, want keys such as %s", kind(root), KeyNonMasqueradeCIDRs)
	} else {
		f.mapping(root)
		f.values()
	}
	return f
}

// mapping reads the keys of a mapping. If a key is both written and merged, the
// later one applies, as in yaml.v2.
func (f *file) mapping(m *yaml.Node) {
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(m.Content); i += 2 {
		k, v := m.Content[i], target(m.Content[i+1])
		switch named := target(k); {
		case k.Kind == yaml.ScalarNode && k.Tag == "!!merge":
			f.merge(v)
		case named.Kind != yaml.ScalarNode:
			f.fail(k, "a key is %s, want a name", describe(named))
		case len(named.Value) > maxName:
			f.warn(k, "%s is ignored", unknownKey(named.Value))
		default:
			f.key(stringOf(named), k, v, seen)
		}
	}
}

// merge reads the value of the key "<<": a mapping, or a list of mappings of
// which the earlier ones win.
func (f *file) merge(v *yaml.Node) {
	mappings := []*yaml.Node{v}
	if v.Kind == yaml.SequenceNode {
		mappings = v.Content
	}
	for i := len(mappings) - 1; i >= 0; i-- {
		if m := target(mappings[i]); m.Kind == yaml.MappingNode {
			f.mapping(m)
		} else {
			f.fail(mappings[i], `"<<" merges mappings, not %s`, kind(m))
		}
	}
}

func (f *file) key(name string, k, v *yaml.Node, seen map[string]*yaml.Node) {
	known := knownKey(f.keys, name)
	key := cmp.Or(known, strings.ToLower(name))
	if first, twice := seen[key]; twice {
		f.failTolerated(k, "duplicate %s, first set at %s", named("key", name), f.position(first))
	} else {
		seen[key] = k
	}
	if known != "" {
		f.set(key, setting{name, k, v})
	} else if meant := likelyKey(f.keys, name); meant != "" {
		f.failTolerated(k, "%s, did you mean %s?", unknownKey(name), meant)
	} else if name == "data" && v.Kind == yaml.MappingNode {
		f.warn(k, "%s is ignored: this is a ConfigMap; use the content of its entry %q", unknownKey(name), "config")
	} else {
		f.warn(k, "%s is ignored", unknownKey(name))
	}
}

// set adds a setting. The older agents convert YAML to JSON: of equal names the
// last one remains, and different spellings apply in byte order. In JSON all of
// them apply, in file order.
func (f *file) set(key string, s setting) {
	all := f.settings[key]
	i := len(all)
	if !f.json {
		var found bool
		i, found = slices.BinarySearchFunc(all, s, func(a, b setting) int { return strings.Compare(a.name, b.name) })
		if found {
			all[i] = s
			return
		}
	}
	f.settings[key] = slices.Insert(all, i, s)
}

// values reads the values of the known keys. Invalid values of keys that only
// this agent has are dropped.
func (f *file) values() {
	for _, row := range rows() {
		f.ignored = !row.older
		errors := f.errors.total
		if g := f.value(row); g.at != nil && (row.older || f.errors.total == errors) {
			f.given[row.Key] = g
		}
	}
	f.ignored = false
	f.linkLocal()
}

// linkLocal reads the key of non-masquerade-daemon.
func (f *file) linkLocal() {
	old := f.settings[keyLinkLocal]
	if len(old) == 0 {
		return
	}
	at := old[0].key
	if s := f.settings[keyMasqLinkLocal]; len(s) > 0 {
		f.failTolerated(at, "%s is the inverse of %s, which is set at %s: remove one of them", keyLinkLocal, keyMasqLinkLocal, f.position(s[0].key))
		return
	}
	g, set := f.given[keyLinkLocal]
	f.warn(at, "%s is deprecated: write its inverse, %s: %t", keyLinkLocal, keyMasqLinkLocal, g.value == false)
	if set {
		f.given[keyMasqLinkLocal] = given{g.value == false, g.at}
	}
}

func (f *file) position(n *yaml.Node) Position {
	return at(f.name, n.Line, n.Column)
}

func (f *file) fail(n *yaml.Node, format string, args ...any) {
	p := f.problem(n.Line, n.Column, fmt.Sprintf(format, args...))
	p.Tolerated = f.ignored
	f.errors.add(p, maxErrors)
}

// failTolerated reports an error that the older agents ignore.
func (f *file) failTolerated(n *yaml.Node, format string, args ...any) {
	defer func(before bool) { f.ignored = before }(f.ignored)
	f.ignored = true
	f.fail(n, format, args...)
}

// failUnlessJoined reports an error about a key that is ignored in a directory,
// there as a warning.
func (f *file) failUnlessJoined(n *yaml.Node, format string, args ...any) {
	if f.joined {
		f.warn(n, format+"; this is ignored in a directory", args...)
	} else {
		f.fail(n, format, args...)
	}
}

func (f *file) warn(n *yaml.Node, format string, args ...any) {
	f.warnings.add(f.problem(n.Line, n.Column, fmt.Sprintf(format, args...)), maxWarnings)
}
