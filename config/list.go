package config

import (
	"fmt"
	"net/netip"
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

// list decodes a file's settings of a list, of which the last one applies. The older agents check the entries of that
// one alone.
func (f *file) list(row *Row) (items []*yaml.Node) {
	for _, s := range f.settings {
		if s.row != row {
			continue
		}
		if s.value.Kind != yaml.SequenceNode && !isNull(s.value) {
			f.noList(row, s.value)
			continue
		}
		if _, given := f.set[row.Key]; !given {
			f.set[row.Key] = f.position(s.key)
		}
		items = f.items(row, s.value)
	}
	return items
}

// items returns the entries of a list, and reports those that are no text.
func (f *file) items(row *Row, list *yaml.Node) []*yaml.Node {
	for i, item := range list.Content {
		if !f.expand(list, 1) {
			return list.Content[:i]
		}
		entry := target(item)
		switch {
		case isNull(entry):
			f.report(Error, "invalidEntry", item, "an empty entry: write %s, or remove it", row.noun)
		case !row.text(entry):
			f.report(Error, "wrongValue", item, "%s", row.wrongEntry(entry))
		}
	}
	return list.Content
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
	if !row.text(n) {
		return p
	}
	p, msg := row.parse(n.Value)
	if msg != "" {
		f.report(Error, "invalidEntry", item, "%s", msg)
	}
	return p
}
