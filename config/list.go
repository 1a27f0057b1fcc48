package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// An entryKind is what the entries of a list are.
type entryKind struct {
	noun, examples string
	parse          func(string) (netip.Prefix, string) // what is wrong with it; "" if it is valid
}

var (
	cidrs      = entryKind{"a CIDR", `"10.0.0.0/8"`, parseCIDR}
	addresses  = entryKind{"an address or a CIDR", `"198.51.100.11"`, parseAddress}
	interfaces = entryKind{"the name of an interface", `"cni0", "veth*"`, parseInterface}
)

// list decodes a file's settings of a list like encoding/json: a null entry leaves
// what was in its place, in the defaults or in an earlier list, even if that has been
// shortened since. The older agents check only what is left at the end.
func (f *file) list(row *Row) (items []*yaml.Node) {
	var previous []*yaml.Node
	for _, cidr := range row.Entries(f.config) {
		previous = append(previous, &yaml.Node{Kind: yaml.ScalarNode, Value: cidr.String()})
	}
	for _, s := range f.settings {
		n := s.value
		switch {
		case s.row != row:
			continue
		case n.Kind != yaml.SequenceNode && !isNull(n):
			f.noList(row, n)
			continue
		case len(n.Content) == 0:
			previous = nil
		}
		items = previous[:0]
		if _, given := f.set[row.Key]; !given {
			f.set[row.Key] = f.position(s.key)
		}
		for i, item := range n.Content {
			if !f.expand(n, 1) {
				break
			}
			items = slices.Grow(items, 1)[:i+1]
			entry := target(item)
			if isNull(entry) && items[i] != nil {
				f.report(Mistake, "emptyEntry", item, "an empty entry: write %s, or remove it", row.noun)
				continue
			}
			items[i] = item
			if !isNull(entry) && !row.text(entry) {
				f.report(Error, "wrongValue", item, "%s", row.wrongEntry(entry))
			}
		}
		previous = items
	}
	return items
}

func (f *file) noList(row *Row, n *yaml.Node) {
	want := "want a list such as [" + row.examples + "]"
	if _, msg := row.parse(n.Value); msg == "" {
		want = fmt.Sprintf("want a list: write [%q]", n.Value)
	} else if strings.HasPrefix(n.Value, "-") {
		want = `want a list: put a space after each "-"`
	}
	f.wrong(Error, row.Key, n, want)
}

// text reports whether an entry is text for the older agents, if they have the key.
func (r *Row) text(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && !isNull(n) && (!r.BothModes || !isNumber(n) && n.Tag != "!!bool")
}

// wrongEntry describes an entry that is not text.
func (k *entryKind) wrongEntry(n *yaml.Node) string {
	if n.Kind == yaml.MappingNode && len(n.Content) == 2 && n.Content[0].Kind == yaml.ScalarNode {
		text := n.Content[0].Value + ":" // the entry fd00:: is such a mapping
		if _, msg := k.parse(text); msg != "" {
			return msg
		}
		return fmt.Sprintf("an entry is %s: write %q in quotes", describe(n), text)
	}
	return fmt.Sprintf("an entry is %s, want %s", describe(n), k.noun)
}

// entry reads an entry, unless it was reported when its list was decoded.
func (f *file) entry(row *Row, item *yaml.Node) (p netip.Prefix) {
	n := target(item)
	if isNull(n) {
		f.report(Error, "invalidEntry", item, "an empty entry: write %s, or remove it", row.noun)
	}
	if !row.text(n) {
		return p
	}
	p, msg := row.parse(n.Value)
	if msg != "" {
		f.report(Error, "invalidEntry", item, "%s", msg)
	}
	return p
}
