package config

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

// list reads a list of CIDRs. null is an empty one.
func (r *reader) list(key string) given[[]CIDR] {
	s, ok := r.settings[key]
	if !ok {
		return given[[]CIDR]{}
	}
	list := given[[]CIDR]{at: s.key}
	if isNull(s.value) {
		return list
	}
	if s.value.Kind != yaml.SequenceNode {
		hint := ` such as ["10.0.0.0/8"]`
		if _, ok := strictCIDR(s.value.Value); ok {
			hint = fmt.Sprintf(": write [%q]", s.value.Value)
		} else if strings.HasPrefix(s.value.Value, "-") {
			hint = `: put a space behind each "-"`
		}
		r.fail(s.value, "%s is %s, want a list%s", key, describe(s.value), hint)
		return given[[]CIDR]{}
	}
	n := len(s.value.Content)
	for _, item := range s.value.Content {
		n += len(r.folded[item])
	}
	list.value = make([]CIDR, 0, n)
	for _, item := range s.value.Content {
		list.value = append(append(list.value, r.cidr(item)), r.folded[item]...)
	}
	return list
}

// cidr reads an entry of a list. An invalid one is reported, and counts.
func (r *reader) cidr(item *yaml.Node) CIDR {
	n := target(item)
	var p netip.Prefix
	var msg string
	switch {
	case isNull(n):
		msg = "an empty entry: write a CIDR, or remove it"
	case n.Kind == yaml.ScalarNode && (!r.text.json || n.Tag == "!!str"):
		p, msg = parseCIDR(stringOf(n))
	case n.Kind == yaml.MappingNode && len(n.Content) == 2 && !r.text.json:
		_, msg = parseCIDR(n.Content[0].Value + ":") // the entry fd00:: is one
	default:
		msg = fmt.Sprintf("an entry is %s, want a CIDR", describe(n))
	}
	if msg != "" {
		r.fail(item, "%s", msg)
		return CIDR{}
	}
	return CIDR{Prefix: p, Pos: r.position(item)}
}

// value returns the value of a known key, or nil where the file leaves it out
// or says null.
func (r *reader) value(key string) *yaml.Node {
	s, ok := r.settings[key]
	if !ok || isNull(s.value) {
		return nil
	}
	return s.value
}

// bool reads what yaml.v3 decodes into a bool: also yes and on, which are
// booleans of YAML 1.1.
func (r *reader) bool(key string) (v given[bool]) {
	n := r.value(key)
	if n == nil {
		return v
	}
	word := *n
	if n.Tag == "!!bool" && !r.text.json {
		word.Tag = "!!str" // so that !!bool yes is one, as with yaml.v2
	}
	valid := !r.text.json || n.Tag == "!!bool"
	if n.Kind != yaml.ScalarNode || !valid || n.Decode(&v.value) != nil && word.Decode(&v.value) != nil {
		r.fail(n, "%s is %s, want true or false", key, describe(n))
		return given[bool]{}
	}
	v.at = n
	return v
}

// int reads a whole number; in YAML also one that is written 64.0 or 0x40.
func (r *reader) int(key string) (v given[int]) {
	n := r.value(key)
	if n == nil {
		return v
	}
	var number any
	if n.Kind == yaml.ScalarNode && n.Decode(&number) == nil && (!r.text.json || n.Tag == "!!int") {
		switch x := number.(type) {
		case int:
			return given[int]{x, n}
		case float64:
			if float64(int(x)) == x {
				return given[int]{int(x), n}
			}
		}
	}
	r.fail(n, "%s is %s, want a whole number", key, describe(n))
	return v
}

// duration reads a Go duration above zero.
func (r *reader) duration(key string) (v given[time.Duration]) {
	n := r.value(key)
	if n == nil {
		return v
	}
	s := stringOf(n)
	d, err := time.ParseDuration(s)
	_, noNumber := strconv.ParseFloat(s, 64)
	switch {
	case n.Kind == yaml.ScalarNode && (n.Tag == "!!int" || n.Tag == "!!float" || noNumber == nil):
		want := s + "s"
		if d, err := time.ParseDuration(want); err != nil || d <= 0 {
			want = "60s"
		}
		r.fail(n, "%s is %s, without a unit: write %q", key, describe(n), want)
	case n.Kind != yaml.ScalarNode || err != nil:
		r.fail(n, "%s is %s, want a duration such as %q; the units are ms, s, m, h", key, describe(n), "60s")
	case d <= 0:
		r.fail(n, "%s is %s, want more than zero, such as %q", key, describe(n), "60s")
	default:
		if d < ShortestInterval {
			r.warn(n, "%s is %s, and no agent looks more often than every %s", key, describe(n), ShortestInterval)
		}
		return given[time.Duration]{d, n}
	}
	return v
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// stringOf returns a scalar as yaml.v3 decodes it into a string: only that of
// tag !!binary is not as it stands.
func stringOf(n *yaml.Node) string {
	s := n.Value
	if n.Tag == "!!binary" && len(s) <= maxName {
		_ = n.Decode(&s) // what is no base64 stays as it is, and is refused as that
	}
	return s
}

// describe names what a value is.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Tag == "!!int", n.Tag == "!!float":
		return "the number " + clip(n.Value)
	case n.Tag == "!!bool":
		return clip(n.Value)
	}
	return "the text " + quote(n.Value)
}
