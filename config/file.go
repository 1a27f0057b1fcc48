package config

import (
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

const (
	// maxName is the longest key, in bytes, that is compared with the known ones.
	maxName = 1024
	// maxExpanded bounds the keys and entries that are read in one file, aliases
	// expanded, and maxMerges the mappings that are merged.
	maxExpanded = 300_000
	maxMerges   = 3000
)

// file is the content of one source.
type file struct {
	*text
	*parser
	settings []setting // in the order in which they apply
	expanded int       // see maxExpanded
}

// setting is one occurrence of a known key.
type setting struct {
	row        *Row
	name       string // as spelled
	key, value *yaml.Node
}

// read reads the settings of a source, unless it is ignored or no config.
func (p *parser) read(s Source) {
	f := &file{text: newText(s), parser: p}
	p.files = append(p.files, f)
	if s.Ignored {
		p.add(Note, "ignoredFile", Position{File: f.name},
			"not read: in a directory, only names that begin with ip-masq or end in .yaml, .yml or .json are read")
		return
	}
	reported := len(p.kept)
	root := f.root()
	if root == nil {
		return
	}
	if isNull(root) || root.Kind == yaml.MappingNode && len(root.Content) == 0 {
		if len(p.kept) > reported { // such as a second document
			return
		}
		p.add(Note, "emptyFile", Position{f.name, 1, 1},
			"the file is empty: each key has its default, unless another file sets it")
		return
	}
	if root.Kind != yaml.MappingNode {
		f.report(Error, "noKeys", root, "the file contains %s, want keys such as %s", kind(root), KeyNonMasqueradeCIDRs)
		return
	}
	if f.isManifest(root) {
		return
	}
	f.mapping(root)
	// The older agents convert YAML to JSON: of equal names the last one remains, and
	// different spellings apply in byte order. In JSON all apply as written.
	if !f.json {
		byName := func(a, b setting) int { return strings.Compare(a.name, b.name) }
		slices.Reverse(f.settings)
		slices.SortStableFunc(f.settings, byName)
		f.settings = slices.CompactFunc(f.settings, func(a, b setting) bool { return byName(a, b) == 0 })
	}
}

// mapping reads the keys of a mapping. If a key is both written and merged, the
// later one applies, as in yaml.v2.
func (f *file) mapping(m *yaml.Node) {
	seen := map[string]*yaml.Node{}
	for i := 0; i < len(m.Content) && f.expand(m, 1); i += 2 {
		k := m.Content[i]
		v := target(m.Content[i+1])
		name := target(k)
		switch {
		case k.Tag == "!!merge":
			f.merge(v)
		case name.Kind != yaml.ScalarNode, name.Tag == "!!binary":
			f.report(Error, "wrongValue", k, "a key is %s, want a name", describe(name))
		default:
			f.key(name.Value[:min(len(name.Value), maxName)], k, v, seen)
		}
	}
}

// expand reports whether more values may be read after aliases have been expanded.
func (f *file) expand(n *yaml.Node, values int) bool {
	if f.expanded <= maxExpanded && f.expanded+values > maxExpanded {
		f.report(Error, "alias", n, "the aliases expand to more than a config file may hold: write the values out")
	}
	f.expanded += values
	return f.expanded <= maxExpanded
}

// merge reads the value of the key "<<": a mapping, or a list of mappings of
// which the earlier ones win.
func (f *file) merge(v *yaml.Node) {
	mappings := []*yaml.Node{v}
	if v.Kind == yaml.SequenceNode {
		mappings = v.Content
	}
	for _, n := range slices.Backward(mappings) {
		if m := target(n); m.Kind != yaml.MappingNode {
			f.report(Error, "wrongValue", n, `"<<" merges mappings, not %s`, kind(m))
		} else if f.expand(n, maxExpanded/maxMerges) {
			f.mapping(m)
		}
	}
}

// key reads a key of a mapping: seen has those before it, by the known key, or else by the name in lower case.
func (f *file) key(name string, k, v *yaml.Node, seen map[string]*yaml.Node) {
	row := knownKey(name)
	key := strings.ToLower(name)
	if row != nil {
		key = row.Key
	}
	if first := seen[key]; first != nil {
		f.report(Mistake, "duplicateKey", k, "duplicate %s, first set at %s", named("key", name), f.position(first))
	} else {
		seen[key] = k
	}
	if row != nil {
		f.settings = append(f.settings, setting{row, name, k, v})
	} else if meant := likelyKey(name); meant != "" {
		f.report(Mistake, "misspelledKey", k, "%s, did you mean %s?", named("unknown key", name), meant)
	} else {
		f.report(Warning, "unknownKey", k, "%s is ignored", named("unknown key", name))
	}
}

// target returns the node that an alias refers to, or n itself.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func (f *file) position(n *yaml.Node) Position { return Position{f.name, n.Line, n.Column} }

func (f *file) report(level Level, id string, n *yaml.Node, format string, args ...any) {
	f.add(level, id, f.position(n), format, args...)
}
