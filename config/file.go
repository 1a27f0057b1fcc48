package config

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

// maxName is the longest key, in bytes, that is compared with the known ones.
const maxName = 1024

// file is the content of one source.
type file struct {
	text *text

	lists          map[string]given[[]CIDR]      // by key
	names          map[string]given[[]Interface] // by key
	bools          map[string]given[bool]        // by key
	resyncInterval given[time.Duration]
	cidrLimit      given[int]
	stale          given[Stale]

	errors, warnings report
	ignored          bool // errors found now are ignored by the older agents
	joined           bool // see Source
}

// given is the value of a key and its node.
type given[T any] struct {
	value T
	at    *yaml.Node // nil if the file does not set the key
}

// reader walks the nodes of one file.
type reader struct {
	file
	defaults Config
	keys     []string // the known keys
	folded   folds
	settings map[string][]setting // by known key, in the order in which they apply
}

// setting is one occurrence of a known key, as spelled in the file.
type setting struct {
	name       string
	key, value *yaml.Node
}

func readFile(d Defaults, s Source, left *budget) *file {
	r := reader{file: file{text: newText(s), joined: s.Joined}, defaults: Default(d), keys: Keys(), settings: map[string][]setting{}}
	var root *yaml.Node
	var problems []Problem
	switch {
	case s.Ignored:
		r.warnings.add(Problem{
			Pos: at(r.text.name, 0, 0), Note: true,
			Msg: "not read: in a directory, only names that begin with ip-masq or end in .yaml, .yml or .json are read",
		}, maxWarnings)
	case strings.Count(r.text.s, "\n") > maxLines:
		problems = []Problem{r.text.tooMuch()}
	case r.text.json:
		root, problems = r.text.readJSON(left)
	default:
		root, r.folded, problems = r.text.readYAML(left)
	}
	for _, p := range problems {
		r.errors.add(p, maxErrors)
	}
	if root == nil {
		return &r.file
	}
	counted := aliases{lists: r.folded, sizes: map[*yaml.Node]int{}}
	if bad, msg := counted.check(root); bad != nil {
		r.fail(bad, "%s", msg)
	} else if root.Kind != yaml.MappingNode {
		r.fail(root, "the file contains %s, want keys such as %s", kind(root), KeyNonMasqueradeCIDRs)
	} else {
		r.mapping(root)
		r.values()
	}
	return &r.file
}

// mapping reads the keys of a mapping. If a key is both written and merged, the
// later one applies, as in yaml.v2.
func (r *reader) mapping(m *yaml.Node) {
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(m.Content); i += 2 {
		k, v := m.Content[i], target(m.Content[i+1])
		switch named := target(k); {
		case k.Kind == yaml.ScalarNode && k.Tag == "!!merge":
			r.merge(v)
		case named.Kind != yaml.ScalarNode:
			r.fail(k, "a key is %s, want a name", describe(named))
		case len(named.Value) > maxName:
			r.warn(k, "%s is ignored", unknownKey(named.Value))
		default:
			r.key(stringOf(named), k, v, seen)
		}
	}
}

// merge reads the value of the key "<<": a mapping, or a list of mappings of
// which the earlier ones win.
func (r *reader) merge(v *yaml.Node) {
	mappings := []*yaml.Node{v}
	if v.Kind == yaml.SequenceNode {
		mappings = v.Content
	}
	for i := len(mappings) - 1; i >= 0; i-- {
		if m := target(mappings[i]); m.Kind == yaml.MappingNode {
			r.mapping(m)
		} else {
			r.fail(mappings[i], `"<<" merges mappings, not %s`, kind(m))
		}
	}
}

func (r *reader) key(name string, k, v *yaml.Node, seen map[string]*yaml.Node) {
	key, known := knownKey(r.keys, name)
	if !known {
		key = strings.ToLower(name)
	}
	if first, twice := seen[key]; twice {
		r.failTolerated(k, "duplicate %s, first set at %s", named("key", name), r.position(first))
	} else {
		seen[key] = k
	}
	if known {
		r.set(key, setting{name, k, v})
	} else if meant, likely := likelyKey(r.keys, name); likely {
		r.failTolerated(k, "%s, did you mean %s?", unknownKey(name), meant)
	} else if name == "data" && v.Kind == yaml.MappingNode {
		r.warn(k, "%s is ignored: this is a ConfigMap; use the content of its entry %q", unknownKey(name), "config")
	} else {
		r.warn(k, "%s is ignored", unknownKey(name))
	}
}

// set adds a setting. The older agents convert YAML to JSON: of equal names the
// last one remains, and different spellings apply in byte order. In JSON all of
// them apply, in file order.
func (r *reader) set(key string, s setting) {
	all := r.settings[key]
	i := len(all)
	if !r.text.json {
		var found bool
		i, found = slices.BinarySearchFunc(all, s, func(a, b setting) int { return strings.Compare(a.name, b.name) })
		if found {
			all[i] = s
			return
		}
	}
	r.settings[key] = slices.Insert(all, i, s)
}

// values reads the values of the known keys. Invalid values of keys that only
// this agent has are dropped.
func (r *reader) values() {
	r.lists, r.names, r.bools = map[string]given[[]CIDR]{}, map[string]given[[]Interface]{}, map[string]given[bool]{}
	for _, row := range Conditions() {
		r.ignored = row.Key != KeyNonMasqueradeCIDRs
		errors := r.errors.total
		switch {
		case row.off != nil:
			r.bools[row.Key] = r.bool(row.Key)
		case row.interfaces != nil:
			r.names[row.Key] = r.interfaces(row.Key)
		default:
			r.lists[row.Key] = r.list(row.Key, cidrEntry)
		}
		if r.ignored && r.errors.total > errors {
			delete(r.lists, row.Key)
			delete(r.names, row.Key)
			delete(r.bools, row.Key)
		}
	}
	for _, b := range boolKeys() {
		r.ignored = b.name == keyEnableIPv6
		errors := r.errors.total
		if r.bools[b.name] = r.bool(b.name); r.ignored && r.errors.total > errors {
			delete(r.bools, b.name)
		}
	}
	r.ignored = true
	r.translations()
	r.linkLocal()
	r.stale = r.staleConnections()
	r.bools[KeyEnforceNonMasquerade] = r.bool(KeyEnforceNonMasquerade)
	r.ignored = false
	r.resyncInterval = r.duration(keyResyncInterval)
	r.cidrLimit = r.int(keyCIDRLimit)
}

// translations reads the lists of these keys.
func (r *reader) translations() {
	for _, t := range Translations() {
		if t.cidrs == nil {
			continue
		}
		errors := r.errors.total
		if list := r.list(t.Key, addressEntry); r.errors.total == errors {
			r.lists[t.Key] = list
		}
	}
}

// linkLocal reads the key of non-masquerade-daemon.
func (r *reader) linkLocal() {
	old := r.settings[keyLinkLocal]
	if len(old) == 0 {
		return
	}
	at := old[0].key
	errors := r.errors.total
	v := r.bool(keyLinkLocal)
	invalid := r.errors.total > errors
	if s := r.settings[keyMasqLinkLocal]; len(s) > 0 {
		r.fail(at, "%s is the inverse of %s, which is set at %s: remove one of them", keyLinkLocal, keyMasqLinkLocal, r.position(s[0].key))
		return
	}
	r.warn(at, "%s is deprecated: write its inverse, %s: %t", keyLinkLocal, keyMasqLinkLocal, v.at != nil && !v.value)
	if v.at != nil && !invalid {
		r.bools[keyMasqLinkLocal] = given[bool]{!v.value, v.at}
	}
}

func (f *file) position(n *yaml.Node) Position {
	return at(f.text.name, n.Line, n.Column)
}

func (f *file) fail(n *yaml.Node, format string, args ...any) {
	p := f.text.problem(n.Line, n.Column, fmt.Sprintf(format, args...))
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
	f.warnings.add(f.text.problem(n.Line, n.Column, fmt.Sprintf(format, args...)), maxWarnings)
}
