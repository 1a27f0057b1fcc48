package nft

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// A SNAT is the addresses that masqueraded connections of a family leave from. The zero
// value is masquerading: each leaves from the address of its interface.
type SNAT struct {
	List
	// Present are those that the node has, sorted. They are no part of the policy:
	// the same config serves all nodes.
	Present []netip.Addr
}

// A SNATRule is an entry of snatRules, as far as it concerns a family.
type SNATRule struct {
	SNAT             // its addresses
	Place        int // in the list, from 1
	Pos          config.Position
	Sources      List // none: any address
	Destinations List
	Interfaces   []config.Interface
}

// RuleChain is the beginning of the name of an entry's chain, before its place.
const RuleChain = "snat-rule-"

// newSNATRules returns the entries that can match connections of a family.
func newSNATRules(entries []config.SNATRule, ipv6 bool) (rules []SNATRule) {
	for i, e := range entries {
		r := SNATRule{
			SNAT: SNAT{List: NewList(ofFamily(e.Addresses, ipv6))}, Place: i + 1, Pos: e.Pos,
			Sources: NewList(ofFamily(e.From, ipv6)), Destinations: NewList(ofFamily(e.To, ipv6)), Interfaces: uncovered(e.Out),
		}
		other := len(r.CIDRs) == 0 || len(e.From) > 0 && len(r.Sources.CIDRs) == 0 ||
			len(e.To) > 0 && len(r.Destinations.CIDRs) == 0
		if !other {
			rules = append(rules, r)
		}
	}
	return rules
}

// String returns what the entry says about its family.
func (r SNATRule) String() string {
	var parts []string
	add := func(word string, texts []string) {
		if len(texts) > 0 {
			parts = append(parts, word+" "+strings.Join(texts, ", "))
		}
	}
	add("from", config.Texts(r.Sources.CIDRs))
	add("to", config.Texts(r.Destinations.CIDRs))
	add("leaves from", config.Texts(r.CIDRs))
	add("by", config.Names(r.Interfaces))
	return strings.Join(parts, " ")
}

// SNATAddresses returns the addresses of the node that connections of pods may leave from other
// than that of the interface.
func (f FamilyPolicy) SNATAddresses() []netip.Addr {
	sources := slices.Clone(f.SNAT.Present)
	for _, r := range f.SNATRules {
		sources = append(sources, r.Present...)
	}
	slices.SortFunc(sources, netip.Addr.Compare)
	return slices.Compact(sources)
}

// SNATRules counts the entries of snatRules of which the node has an address, and those of
// which it has none.
func (p Policy) SNATRules() (present, absent int) {
	found := map[int]bool{}
	for _, f := range p.Families {
		for _, r := range f.SNATRules {
			found[r.Place] = found[r.Place] || len(r.Present) > 0
		}
	}
	for _, available := range found {
		if available {
			present++
		} else {
			absent++
		}
	}
	return present, absent
}

// Translates reports whether the node has an address that connections of pods may leave
// from other than that of the interface.
func (f FamilyPolicy) Translates() bool {
	return len(f.SNATAddresses()) > 0
}

// WithAddresses returns the policy on a node that has these addresses and no others.
func (p Policy) WithAddresses(addresses []netip.Addr) Policy {
	p.Families = slices.Clone(p.Families)
	for i := range p.Families {
		f := &p.Families[i]
		f.SNAT = f.SNAT.withPresent(addresses)
		f.SNATRules = slices.Clone(f.SNATRules)
		for j := range f.SNATRules {
			f.SNATRules[j].SNAT = f.SNATRules[j].withPresent(addresses)
		}
	}
	return p
}

func (s SNAT) withPresent(addresses []netip.Addr) SNAT {
	s.Present = nil
	for _, a := range addresses {
		if a.IsGlobalUnicast() && s.Contains(a) {
			s.Present = append(s.Present, a)
		}
	}
	slices.SortFunc(s.Present, netip.Addr.Compare)
	s.Present = slices.Compact(s.Present)
	return s
}

// WithAddresses returns the ruleset on a node that has these addresses and no others.
func (r Ruleset) WithAddresses(addresses []netip.Addr) Ruleset {
	p := r.Policy.WithAddresses(addresses)
	if p.samePresent(r.Policy) {
		return r
	}
	return Ruleset{Policy: p, Layout: r.Layout, Tables: r.Layout.Compile(p, r.Hash()), digest: r.digest}
}

// samePresent reports whether the node has the same of snatAddresses and snatRules.
func (p Policy) samePresent(o Policy) bool {
	return slices.EqualFunc(p.Families, o.Families, func(a, b FamilyPolicy) bool {
		return slices.Equal(a.SNAT.Present, b.SNAT.Present) &&
			slices.EqualFunc(a.SNATRules, b.SNATRules, func(a, b SNATRule) bool { return slices.Equal(a.Present, b.Present) })
	})
}

// HasSNAT reports whether the policy has snatAddresses or snatRules.
func (p Policy) HasSNAT() bool {
	return slices.ContainsFunc(p.Families, func(f FamilyPolicy) bool { return len(f.SNAT.CIDRs)+len(f.SNATRules) > 0 })
}

// SNATOf returns the addresses of a family.
func (p Policy) SNATOf(ipv6 bool) SNAT {
	f, _ := p.Family(ipv6)
	return f.SNAT
}

// Contains reports whether an entry contains the address.
func (l List) Contains(a netip.Addr) bool {
	i, _ := slices.BinarySearchFunc(l.sorted, a, func(p netip.Prefix, a netip.Addr) int {
		if p.Addr().Compare(a) <= 0 {
			return -1
		}
		return 1
	})
	return i > 0 && l.sorted[i-1].Contains(a) // none covers another
}

// Absent returns the entries of the list of which the node has no address.
func (s SNAT) Absent() (absent []config.CIDR) {
	for _, c := range s.CIDRs {
		if !slices.ContainsFunc(s.Present, c.Contains) {
			absent = append(absent, c)
		}
	}
	return absent
}

// buckets is into how many groups pods fall, by the last byte of their address.
const buckets = 256

func bucketOf(pod netip.Addr) byte {
	b := pod.AsSlice()
	return b[len(b)-1]
}

// Address returns the address that connections of a pod leave from; false if they are
// masqueraded.
func (s SNAT) Address(pod netip.Addr) (netip.Addr, bool) {
	if len(s.Present) == 0 {
		return netip.Addr{}, false
	}
	return s.assign()[bucketOf(pod)], true
}

// Mappings returns the last byte of a pod's address, alone, with the address that
// connections of such pods leave from.
func (s SNAT) Mappings() []nfnetlink.Mapping {
	mappings := make([]nfnetlink.Mapping, buckets)
	for i, a := range s.assign() {
		key := make([]byte, len(a.AsSlice()))
		key[len(key)-1] = byte(i)
		mappings[i].Key, _ = netip.AddrFromSlice(key)
		mappings[i].Value = a
	}
	return mappings
}

// assign chooses the address of each bucket: the one that draws the highest number for
// it (rendezvous hashing). So an address that goes moves only its own pods, and one that
// comes moves no pod but to itself. What an address draws must be the same in all
// versions and on all nodes.
func (s SNAT) assign() (assigned [buckets]netip.Addr) {
	var highest [buckets]uint64
	for _, a := range s.Present {
		var seed [32]byte
		copy(seed[:], a.AsSlice())
		draw := rand.NewChaCha8(seed)
		for b := range assigned {
			if n := draw.Uint64(); n > highest[b] || !assigned[b].IsValid() {
				highest[b] = n
				assigned[b] = a
			}
		}
	}
	return assigned
}
