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

// list returns the entries of a file's last setting of a list. The older agents check only
// these, but an entry of any setting must be a text.
func (f *file) list(row *Row) (items []*yaml.Node) {
	for _, s := range f.settings {
		n := s.value
		switch {
		case s.row != row:
			continue
		case n.Kind != yaml.SequenceNode && !isNull(n):
			f.noList(row, n)
			continue
		}
		if _, again := f.set[row.Key]; !again {
			f.set[row.Key] = f.position(s.key)
		}
		items = nil
		for _, item := range n.Content {
			if !f.expand(n, 1) {
				break
			}
			items = append(items, item)
			if entry := target(item); !isNull(entry) && !row.text(entry) {
				f.report(Error, "wrongValue", item, "%s", row.wrongEntry(entry))
			}
		}
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
	return n.Kind == yaml.ScalarNode && !isNull(n) && (!r.older || !isNumber(n) && n.Tag != "!!bool")
}

// wrongEntry describes an entry that is not text.
func (k *entryKind) wrongEntry(n *yaml.Node) string {
	if n.Kind == yaml.MappingNode && len(n.Content) == 2 {
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
	msg := "an empty entry: write " + row.noun + ", or remove it"
	if row.text(n) {
		p, msg = row.parse(n.Value)
	} else if !isNull(n) {
		return p
	}
	if msg != "" {
		f.report(Error, "invalidEntry", item, "%s", msg)
	}
	return p
}
