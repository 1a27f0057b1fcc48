package nft

import (
	"net/netip"
	"slices"

	"nft-masq-agent/config"
)

// Entries counts entries of a policy's lists.
type Entries struct {
	Count int
	First []string // the first few, as KEY: ENTRY
}

func (e *Entries) add(key, entry string, few int) {
	e.Count++
	if len(e.First) < few {
		e.First = append(e.First, key+": "+entry)
	}
}

// Beyond returns the CIDRs and interfaces that are in the lists of p but not in
// the same lists of o, with the text of the first few.
func (p Policy) Beyond(o Policy, few int) Entries {
	var e Entries
	for _, f := range p.Families {
		old, _ := o.Family(f.IPv6)
		for _, q := range f.Questions {
			before := old.question(q.Key)
			for _, c := range q.Prefixes() {
				if !before.hasEntry(c) {
					e.add(q.Key, c.String(), few)
				}
			}
			for _, i := range q.Interfaces {
				if !slices.ContainsFunc(before.Interfaces, func(b config.Interface) bool { return b.Name == i.Name }) && !f.IPv6 {
					e.add(q.Key, i.Name, few) // the same in all families
				}
			}
		}
		for _, c := range f.SNAT.CIDRs {
			if !old.SNAT.hasEntry(c.Prefix) {
				e.add(config.KeySNATAddresses, c.Text(), few)
			}
		}
		for _, r := range f.SNATRules {
			if !slices.ContainsFunc(old.SNATRules, func(o SNATRule) bool { return o.String() == r.String() }) {
				e.add(config.KeySNATRules, r.String(), few)
			}
		}
	}
	return e
}

func (l List) hasEntry(p netip.Prefix) bool {
	_, found := slices.BinarySearchFunc(l.sorted, p, netip.Prefix.Compare)
	return found
}
