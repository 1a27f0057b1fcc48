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
		for _, q := range f.Questions {
			before := o.question(f.IPv6, q.Key)
			prefixes := before.Prefixes()
			for _, c := range q.Prefixes() {
				if _, found := slices.BinarySearchFunc(prefixes, c, netip.Prefix.Compare); !found {
					e.add(q.Key, c.String(), few)
				}
			}
			for _, i := range q.Interfaces {
				if !slices.ContainsFunc(before.Interfaces, func(b config.Interface) bool { return b.Name == i.Name }) && !f.IPv6 {
					e.add(q.Key, i.Name, few) // the same in all families
				}
			}
		}
		before := o.SNATOf(f.IPv6).Prefixes()
		for _, c := range f.SNAT.CIDRs {
			if _, found := slices.BinarySearchFunc(before, c.Prefix, netip.Prefix.Compare); !found {
				e.add(config.KeySNATAddresses, c.Text(), few)
			}
		}
	}
	return e
}

func (p Policy) question(ipv6 bool, key string) Question {
	for _, f := range p.Families {
		if f.IPv6 != ipv6 {
			continue
		}
		for _, q := range f.Questions {
			if q.Key == key {
				return q
			}
		}
	}
	return Question{}
}
