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

// An entryKind is what the entries of a list are.
type entryKind struct {
	parse         func(string) (netip.Prefix, string)
	noun, example string
}

var (
	cidrEntry    = entryKind{parseCIDR, "a CIDR", "10.0.0.0/8"}
	addressEntry = entryKind{parseAddress, "an address or a CIDR", "198.51.100.11"}
)

// list reads a list of CIDRs or addresses; null is an empty list.
func (r *reader) list(key string, kind entryKind) (list given[[]CIDR]) {
	var before []CIDR // what encoding/json decodes into
	if key == KeyNonMasqueradeCIDRs {
		before = r.defaults.NonMasqueradeCIDRs
	}
	for i, s := range r.settings[key] {
		list = given[[]CIDR]{at: s.key}
		switch {
		case isNull(s.value):
		case s.value.Kind == yaml.SequenceNode:
			last := i == len(r.settings[key])-1
			list.value = r.cidrs(s.value, kind, before, last)
		default:
			r.notAList(key, kind, s.value)
			list.at = nil
		}
		before = overlay(list.value, before)
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

func (r *reader) notAList(key string, kind entryKind, n *yaml.Node) {
	hint := fmt.Sprintf(" such as [%q]", kind.example)
	if _, msg := kind.parse(n.Value); msg == "" {
		hint = fmt.Sprintf(": write [%q]", n.Value)
	} else if strings.HasPrefix(n.Value, "-") {
		hint = `: put a space after each "-"`
	}
	r.fail(n, "%s is %s, want a list%s", key, describe(n), hint)
}

// cidrs reads the entries of a list. The older agents check only the last list of
// a key; an empty entry keeps the previous value.
func (r *reader) cidrs(n *yaml.Node, kind entryKind, before []CIDR, last bool) []CIDR {
	size := len(n.Content)
	for _, item := range n.Content {
		size += len(r.folded.omitted(item))
	}
	if len(n.Content) > 0 {
		if all := r.folded[n.Content[0]]; len(all) == size {
			return slices.Clip(all) // not copied: it may be long
		}
	}
	list := make([]CIDR, 0, size)
	for _, item := range n.Content {
		var left CIDR
		if i := len(list); i < len(before) {
			left = before[i]
		}
		list = append(append(list, r.cidr(item, kind, left, last)), r.folded.omitted(item)...)
	}
	return list
}

// cidr reads an entry of a list. An invalid one is reported and still counted.
func (r *reader) cidr(item *yaml.Node, kind entryKind, left CIDR, last bool) CIDR {
	n := target(item)
	var p netip.Prefix
	var msg string
	var checked bool // by the older agents
	switch {
	case isNull(n):
		msg, checked = "an empty entry: write "+kind.noun+", or remove it", last && !left.IsValid()
	case n.Kind == yaml.ScalarNode && (!r.text.json || n.Tag == "!!str"):
		left = CIDR{}
		p, msg = kind.parse(stringOf(n))
		checked = last || isNumber(n) || n.Tag == "!!bool"
	case n.Kind == yaml.MappingNode && len(n.Content) == 2 && !r.text.json:
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
		return CIDR{Prefix: p, Pos: r.position(item)}
	case checked:
		r.fail(item, "%s", msg)
	default:
		r.failTolerated(item, "%s", msg)
	}
	return left
}

// given returns the values of a known key that are not null, in the order in
// which they apply: all must be valid, and the last one wins.
func (r *reader) given(key string) []*yaml.Node {
	var values []*yaml.Node
	for _, s := range r.settings[key] {
		if !isNull(s.value) {
			values = append(values, s.value)
		}
	}
	return values
}

// bool reads whatever yaml.v3 decodes into a bool, including yes and on, which
// are booleans in YAML 1.1.
func (r *reader) bool(key string) (v given[bool]) {
	for _, n := range r.given(key) {
		word := *n
		if n.Tag == "!!bool" && !r.text.json {
			word.Tag = "!!str" // so that !!bool yes is accepted, as in yaml.v2
		}
		var b bool
		valid := !r.text.json || n.Tag == "!!bool"
		if n.Kind != yaml.ScalarNode || !valid || n.Decode(&b) != nil && word.Decode(&b) != nil {
			r.fail(n, "%s is %s, want true or false", key, describe(n))
			continue
		}
		v = given[bool]{b, n}
	}
	return v
}

// int reads an integer; in YAML it may be written 64.0 or 0x40.
func (r *reader) int(key string) (v given[int]) {
	for _, n := range r.given(key) {
		i, ok := r.integer(n)
		if !ok {
			r.failUnlessJoined(n, "%s is %s, want a whole number", key, describe(n))
			continue
		}
		v = given[int]{i, n}
	}
	return v
}

func (r *reader) integer(n *yaml.Node) (int, bool) {
	var number any
	if n.Kind != yaml.ScalarNode || n.Decode(&number) != nil || r.text.json && n.Tag != "!!int" {
		return 0, false
	}
	switch x := number.(type) {
	case int:
		return x, true
	case float64:
		return int(x), float64(int(x)) == x
	}
	return 0, false
}

// staleConnections reads the key staleConnections.
func (r *reader) staleConnections() (v given[Stale]) {
	for _, n := range r.given(keyStaleConnections) {
		word := Stale(strings.ToLower(n.Value))
		switch {
		case n.Kind == yaml.ScalarNode && word == "keep":
			v = given[Stale]{StaleKeep, n}
		case n.Kind == yaml.ScalarNode && (word == StaleUDP || word == StaleAll):
			v = given[Stale]{word, n}
		default:
			r.fail(n, "%s is %s, want keep, udp or all", keyStaleConnections, describe(n))
		}
	}
	return v
}

// duration reads a Go duration. The older agents accept zero or less, and then
// never pause.
func (r *reader) duration(key string) (v given[time.Duration]) {
	for _, n := range r.given(key) {
		s := stringOf(n)
		d, err := time.ParseDuration(s)
		number := isNumber(n)
		_, noNumber := strconv.ParseFloat(s, 64)
		switch {
		case n.Kind == yaml.ScalarNode && !number && err == nil && d <= 0: // also "0"
			r.ignored = true
			r.failUnlessJoined(n, "%s is %s, want more than zero, such as %q", key, describe(n), "60s")
			r.ignored = false
			if r.joined {
				continue
			}
		case n.Kind == yaml.ScalarNode && (number || noNumber == nil):
			want := s + "s"
			if d, err := time.ParseDuration(want); err != nil || d <= 0 {
				want = "60s"
			}
			r.failUnlessJoined(n, "%s is %s, without a unit: write %q", key, describe(n), want)
			continue
		case n.Kind != yaml.ScalarNode || err != nil:
			r.failUnlessJoined(n, "%s is %s, want a duration such as %q; the units are ms, s, m, h", key, describe(n), "60s")
			continue
		case d < shortestInterval:
			r.warn(n, "%s is %s, below the minimum: %s is used", key, describe(n), "1s")
		case d > longestInterval:
			r.warn(n, "%s is %s, above the maximum: %s is used", key, describe(n), "24h")
		}
		v = given[time.Duration]{min(max(d, shortestInterval), longestInterval), n}
	}
	return v
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
