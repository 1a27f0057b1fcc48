package config

import (
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// A SNATRule is an entry of snatRules: which masqueraded connections of pods leave from
// which addresses. A list without entries is any source, destination or interface.
type SNATRule struct {
	From, To  []CIDR
	Out       []Interface
	Addresses []CIDR // a single address is a CIDR of its full length
	Pos       Position
}

// maxSNATRules is the most entries of snatRules.
const maxSNATRules = 64

// Texts returns the [CIDR.Text] of each CIDR.
func Texts(list []CIDR) (texts []string) {
	for _, c := range list {
		texts = append(texts, c.Text())
	}
	return texts
}

// Names returns the name of each interface.
func Names(list []Interface) (names []string) {
	for _, i := range list {
		names = append(names, i.Name)
	}
	return names
}

// snatFields are the fields of an entry of snatRules.
var snatFields = []Row{
	{Key: "from", entryKind: &cidrs},
	{Key: "to", entryKind: &cidrs},
	{Key: "out", entryKind: &interfaces},
	{Key: "addresses", entryKind: &addresses},
}

// snatRules reads the value of a file's last setting of the key.
func (f *file) snatRules(row *Row) (rules []SNATRule) {
	for _, s := range f.settings {
		if s.row != row || isNull(s.value) {
			continue
		}
		if s.value.Kind != yaml.SequenceNode {
			f.wrong(Error, row.Key, s.value,
				"want a list of entries such as {from: [10.244.8.0/24], addresses: [198.51.100.21]}")
			continue
		}
		f.set[row.Key] = f.position(s.key)
		rules = nil
		for _, item := range s.value.Content {
			if f.expand(item, 1) {
				rules = append(rules, f.snatRule(item))
			}
		}
	}
	return rules
}

func (f *file) snatRule(item *yaml.Node) SNATRule {
	r := SNATRule{Pos: f.position(item)}
	errorsBefore := f.found[Error]
	m := target(item)
	if m.Kind != yaml.MappingNode {
		f.report(Error, "wrongValue", item, "an entry is %s, want a mapping with addresses, and from, to or out", describe(m))
		return r
	}
	given := map[string]bool{}
	for i := 0; i < len(m.Content) && f.expand(m, 1); i += 2 {
		k := m.Content[i]
		v := target(m.Content[i+1])
		index := slices.IndexFunc(snatFields, func(row Row) bool { return strings.EqualFold(row.Key, target(k).Value) })
		switch {
		case index < 0:
			f.report(Error, "invalidEntry", k, "%s of an entry of %s: it has from, to, out and addresses",
				named("unknown field", target(k).Value), KeySNATRules)
			continue
		case given[snatFields[index].Key]:
			f.report(Error, "invalidEntry", k, "%s is there twice in an entry of %s", snatFields[index].Key, KeySNATRules)
			continue
		}
		field := &snatFields[index]
		given[field.Key] = true
		switch {
		case v.Kind != yaml.SequenceNode:
			f.noList(field, v)
		case len(v.Content) == 0:
			f.report(Error, "invalidEntry", k, "%s is empty: write an entry, or remove it", field.Key)
		default:
			f.snatField(&r, field, v)
		}
	}
	switch {
	case !given["addresses"]:
		f.report(Error, "invalidEntry", item, "an entry of %s has no addresses", KeySNATRules)
	case len(given) == 1:
		f.report(Error, "invalidEntry", item, "an entry of %s has none of from, to and out: for all connections, use %s",
			KeySNATRules, KeySNATAddresses)
	}
	if f.found[Error] == errorsBefore && !r.Matches(false) && !r.Matches(true) {
		f.report(Warning, "noEffect", item, "an entry of %s never matches: from, to and addresses have no family in common",
			KeySNATRules)
	}
	return r
}

// Matches reports whether connections of a family can match the entry, and leave from one of its addresses. A list with
// entries of the other family alone matches nothing.
func (r SNATRule) Matches(ipv6 bool) bool {
	included := func(list []CIDR) bool {
		return slices.ContainsFunc(list, func(c CIDR) bool { return c.Addr().Is6() == ipv6 })
	}
	return included(r.Addresses) && (len(r.From) == 0 || included(r.From)) && (len(r.To) == 0 || included(r.To))
}

func (f *file) snatField(r *SNATRule, field *Row, list *yaml.Node) {
	for _, item := range f.items(field, list) {
		p := f.entry(field, item)
		pos := f.position(item)
		switch field.Key {
		case "from":
			r.From = append(r.From, CIDR{p, pos})
		case "to":
			r.To = append(r.To, CIDR{p, pos})
		case "addresses":
			r.Addresses = append(r.Addresses, CIDR{p, pos})
		default:
			r.Out = append(r.Out, Interface{target(item).Value, pos})
		}
	}
	if n := len(r.Out); field.Key == "out" && n > maxInterfaces {
		f.report(Error, "tooManyEntries", list, "out has %d names, at most %d are possible: use a prefix such as %q", n,
			maxInterfaces, "veth*")
	}
}
