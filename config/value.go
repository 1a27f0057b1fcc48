package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

// value reads the value of a key: all that are given must be valid, and the last
// one applies.
func (f *file) value(row Row) (last given) {
	read := f.bool
	switch row.field(&Config{}).(type) {
	case *[]CIDR:
		return f.list(row)
	case *[]Interface:
		return f.interfaces(row.Key)
	case *time.Duration:
		read = f.duration
	case *int:
		read = f.int
	case *Stale:
		read = f.staleConnections
	}
	for _, s := range f.settings[row.Key] {
		if isNull(s.value) {
			continue
		}
		if v, ok := read(row.Key, s.value); ok {
			last = given{v, s.value}
		}
	}
	return last
}

// An entryKind is what the entries of a list are.
type entryKind struct {
	parse         func(string) (netip.Prefix, string)
	noun, example string
}

// list reads a list of CIDRs or addresses.
func (f *file) list(row Row) (list given) {
	kind := entryKind{parseCIDR, "a CIDR", "10.0.0.0/8"}
	if row.addresses {
		kind = entryKind{parseAddress, "an address or a CIDR", "198.51.100.11"}
	}
	var before []CIDR // what encoding/json decodes into
	if row.older {
		before = f.defaults
	}
	for i, s := range f.settings[row.Key] {
		_, msg := kind.parse(s.value.Value)
		entries, ok := f.entries(row.Key, s.value, strconv.Quote(kind.example), msg)
		cidrs := f.cidrs(entries, kind, before, i == len(f.settings[row.Key])-1)
		list, before = given{cidrs, s.key}, overlay(cidrs, before)
		if !ok {
			list = given{}
		}
	}
	return list
}

// overlay returns a list, followed by the entries of a longer previous one that
// decoding leaves in memory. encoding/json starts afresh with an empty list.
func overlay(list, before []CIDR) []CIDR {
	if len(list) == 0 || len(list) >= len(before) {
		return list
	}
	return slices.Concat(list, before[len(list):])
}

// entries returns the entries of a list; null is an empty one. Anything else is an
// error; msg is what is wrong with it as an entry.
func (f *file) entries(key string, n *yaml.Node, examples, msg string) (entries []*yaml.Node, ok bool) {
	if n.Kind == yaml.SequenceNode || isNull(n) {
		return n.Content, true
	}
	hint := " such as [" + examples + "]"
	if msg == "" {
		hint = fmt.Sprintf(": write [%q]", n.Value)
	} else if strings.HasPrefix(n.Value, "-") {
		hint = `: put a space after each "-"`
	}
	f.fail(n, "%s is %s, want a list%s", key, describe(n), hint)
	return nil, false
}

// cidrs reads the entries of a list. The older agents check only the last list of
// a key; an empty entry keeps the previous value.
func (f *file) cidrs(items []*yaml.Node, kind entryKind, before []CIDR, last bool) []CIDR {
	size := len(items)
	for _, item := range items {
		size += len(f.folded.omitted(item))
	}
	if len(items) > 0 {
		if all := f.folded[items[0]]; len(all) == size { // not copied: it may be long
			all[size-1] = f.cidr(items[len(items)-1], kind, CIDR{}, last) // its text may go on in the next line
			return slices.Clip(all)
		}
	}
	list := make([]CIDR, 0, size)
	for _, item := range items {
		var left CIDR
		if i := len(list); i < len(before) {
			left = before[i]
		}
		list = append(append(list, f.cidr(item, kind, left, last)), f.folded.omitted(item)...)
	}
	return list
}

// cidr reads an entry of a list. An invalid one is reported and still counted.
func (f *file) cidr(item *yaml.Node, kind entryKind, left CIDR, last bool) CIDR {
	n := target(item)
	var p netip.Prefix
	var msg string
	var checked bool // by the older agents
	switch {
	case isNull(n):
		msg, checked = "an empty entry: write "+kind.noun+", or remove it", last && !left.IsValid()
	case n.Kind == yaml.ScalarNode && (!f.json || n.Tag == "!!str"):
		left = CIDR{}
		p, msg = kind.parse(stringOf(n))
		checked = last || isNumber(n) || n.Tag == "!!bool"
	case n.Kind == yaml.MappingNode && len(n.Content) == 2 && !f.json:
		left, checked = CIDR{}, true
		text := n.Content[0].Value + ":" // the entry fd00:: is such a mapping
		if _, msg = kind.parse(text); msg == "" {
			msg = fmt.Sprintf("an entry is %s: write %q in quotes", describe(n), text)
		}
	default:
		left, checked = CIDR{}, true
		msg = fmt.Sprintf("an entry is %s, want %s", describe(n), kind.noun)
	}
	switch {
	case msg == "":
		return CIDR{Prefix: p, Pos: f.position(item)}
	case checked:
		f.fail(item, "%s", msg)
	default:
		f.failTolerated(item, "%s", msg)
	}
	return left
}

// bool reads whatever yaml.v3 decodes into a bool, including yes and on, which
// are booleans in YAML 1.1.
func (f *file) bool(key string, n *yaml.Node) (any, bool) {
	word := *n
	if n.Tag == "!!bool" && !f.json {
		word.Tag = "!!str" // so that !!bool yes is accepted, as in yaml.v2
	}
	var b bool
	valid := !f.json || n.Tag == "!!bool"
	if n.Kind != yaml.ScalarNode || !valid || n.Decode(&b) != nil && word.Decode(&b) != nil {
		f.fail(n, "%s is %s, want true or false", key, describe(n))
		return nil, false
	}
	return b, true
}

// int reads an integer; in YAML it may be written 64.0 or 0x40.
func (f *file) int(key string, n *yaml.Node) (any, bool) {
	var number any
	if n.Kind == yaml.ScalarNode && n.Decode(&number) == nil && (!f.json || n.Tag == "!!int") {
		switch x := number.(type) {
		case int:
			return x, true
		case float64:
			if float64(int(x)) == x {
				return int(x), true
			}
		}
	}
	f.failUnlessJoined(n, "%s is %s, want a whole number", key, describe(n))
	return nil, false
}

func (f *file) staleConnections(key string, n *yaml.Node) (any, bool) {
	word := strings.ToLower(n.Value)
	if n.Kind != yaml.ScalarNode || !slices.Contains([]string{"keep", "udp", "all"}, word) {
		f.fail(n, "%s is %s, want keep, udp or all", key, describe(n))
		return nil, false
	}
	if word == "keep" {
		return StaleKeep, true
	}
	return Stale(word), true
}

// duration reads a Go duration. The older agents accept zero or less, and then
// never pause.
func (f *file) duration(key string, n *yaml.Node) (any, bool) {
	s := stringOf(n)
	d, err := time.ParseDuration(s)
	number := isNumber(n)
	_, noNumber := strconv.ParseFloat(s, 64)
	switch {
	case n.Kind == yaml.ScalarNode && !number && err == nil && d <= 0: // also "0"
		f.ignored = true
		f.failUnlessJoined(n, "%s is %s, want more than zero, such as %q", key, describe(n), "60s")
		f.ignored = false
		if f.joined {
			return nil, false
		}
	case n.Kind == yaml.ScalarNode && (number || noNumber == nil):
		want := s + "s"
		if d, err := time.ParseDuration(want); err != nil || d <= 0 {
			want = "60s"
		}
		f.failUnlessJoined(n, "%s is %s, without a unit: write %q", key, describe(n), want)
		return nil, false
	case n.Kind != yaml.ScalarNode || err != nil:
		f.failUnlessJoined(n, "%s is %s, want a duration such as %q; the units are ms, s, m, h", key, describe(n), "60s")
		return nil, false
	case d < shortestInterval:
		f.warn(n, "%s is %s, below the minimum: %s is used", key, describe(n), "1s")
	case d > longestInterval:
		f.warn(n, "%s is %s, above the maximum: %s is used", key, describe(n), "24h")
	}
	return min(max(d, shortestInterval), longestInterval), true
}

func isNumber(n *yaml.Node) bool { return n.Tag == "!!int" || n.Tag == "!!float" }

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// stringOf returns a scalar as yaml.v3 decodes it into a string: as written,
// unless its tag is !!binary.
func stringOf(n *yaml.Node) string {
	s := n.Value
	if n.Tag == "!!binary" && len(s) <= maxName {
		_ = n.Decode(&s) // invalid base64 stays as it is and is rejected later
	}
	return s
}

// kind names the type of a value, without its content.
func kind(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case isNumber(n):
		return "a number"
	}
	return "a text"
}

// describe names the type of a value, and quotes a short one.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind != yaml.ScalarNode:
		return kind(n)
	case !quotable(n.Value):
		return fmt.Sprintf("%s of %d bytes", kind(n), len(n.Value))
	case isNumber(n):
		return "the number " + n.Value
	case n.Tag == "!!bool":
		return n.Value
	case n.Tag == "!!null":
		return "null"
	}
	return "the text " + quote(n.Value)
}
