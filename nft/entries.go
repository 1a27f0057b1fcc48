package nft

import (
	"fmt"
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

// Additions returns the CIDRs, interfaces and entries of snatRules that p has and o does not have, with the text of the
// first few. An entry of snatRules is named by its number, because it can have thousands of CIDRs.
func (p Policy) Additions(o Policy, few int) Entries {
	var e Entries
	var numbers []int
	for _, f := range p.Families {
		old, _ := o.Family(f.IPv6)
		for _, condition := range f.Conditions {
			previous := old.condition(condition.Key)
			for _, c := range condition.Prefixes() {
				if !previous.hasEntry(c) {
					e.add(condition.Key, c.String(), few)
				}
			}
			for _, i := range condition.Interfaces {
				if !slices.ContainsFunc(previous.Interfaces, func(b config.Interface) bool { return b.Name == i.Name }) && !f.IPv6 {
					e.add(condition.Key, i.Name, few) // the same in all families
				}
			}
		}
		previous := old.SNATAddresses().Addresses
		for _, c := range f.SNATAddresses().Addresses.CIDRs {
			if !previous.hasEntry(c.Prefix) {
				e.add(config.KeySNATAddresses, c.Text(), few)
			}
		}
		for _, r := range f.SNATRules() {
			if !slices.ContainsFunc(old.SNATRules(), r.sameEntry) {
				numbers = append(numbers, r.Number)
			}
		}
	}
	slices.Sort(numbers)
	for _, number := range slices.Compact(numbers) { // an entry can be changed in both families
		e.add(config.KeySNATRules, fmt.Sprintf("entry %d", number), few)
	}
	return e
}

// sameEntry reports whether two entries say the same, whatever their numbers are.
func (r SNATRule) sameEntry(o SNATRule) bool {
	return slices.Equal(r.Addresses.sorted, o.Addresses.sorted) && slices.Equal(r.Sources.sorted, o.Sources.sorted) &&
		slices.Equal(r.Destinations.sorted, o.Destinations.sorted) &&
		slices.Equal(config.Names(r.Interfaces), config.Names(o.Interfaces))
}

func (l List) hasEntry(p netip.Prefix) bool {
	_, found := slices.BinarySearchFunc(l.sorted, p, comparePrefixes)
	return found
}
