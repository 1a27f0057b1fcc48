package nft

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// A SNATRule is the part of an entry of snatRules that concerns one family. snatAddresses is one, too: the last,
// without conditions, and with Number 0.
type SNATRule struct {
	Addresses List
	// Present are those of Addresses that the node has, sorted. They are no part of the policy: the same config serves all
	// nodes.
	Present      []netip.Addr
	Number       int // in snatRules, from 1; 0: it is snatAddresses
	Pos          config.Position
	Sources      List // none: any address
	Destinations List
	Interfaces   []config.Interface
}

// RuleChain is the beginning of the name of an entry's chain, before its number.
const RuleChain = "snat-rule-"

// newSNATRules returns the entries that can match connections of a family, and after them snatAddresses.
func newSNATRules(c config.Config, ipv6 bool) (rules []SNATRule) {
	entries := append(slices.Clip(c.SNATRules), config.SNATRule{Addresses: c.SNATAddresses})
	for i, entry := range entries {
		if !entry.Matches(ipv6) {
			continue
		}
		r := SNATRule{
			Addresses:    NewList(ofFamily(entry.Addresses, ipv6)),
			Pos:          entry.Pos,
			Sources:      NewList(ofFamily(entry.From, ipv6)),
			Destinations: NewList(ofFamily(entry.To, ipv6)),
			Interfaces:   uncovered(entry.Out),
		}
		if i < len(c.SNATRules) {
			r.Number = i + 1
		}
		rules = append(rules, r)
	}
	return rules
}

// SNATRules returns the entries of snatRules.
func (f FamilyPolicy) SNATRules() []SNATRule {
	return slices.DeleteFunc(slices.Clone(f.SNAT), func(r SNATRule) bool { return r.Number == 0 })
}

// SNATAddresses returns the entry that snatAddresses is, without addresses if it is not set.
func (f FamilyPolicy) SNATAddresses() SNATRule {
	if n := len(f.SNAT); n > 0 && f.SNAT[n-1].Number == 0 {
		return f.SNAT[n-1]
	}
	return SNATRule{}
}

// String returns the part of the entry that concerns its family, in words.
func (r SNATRule) String() string {
	var parts []string
	add := func(word string, texts []string) {
		if len(texts) > 0 {
			parts = append(parts, word+" "+strings.Join(texts, ", "))
		}
	}
	add("from", config.Texts(r.Sources.CIDRs))
	add("to", config.Texts(r.Destinations.CIDRs))
	add("leaves from", config.Texts(r.Addresses.CIDRs))
	add("by", config.Names(r.Interfaces))
	return strings.Join(parts, " ")
}

// PresentAddresses returns the addresses of snatAddresses and snatRules that the node has, sorted.
func (f FamilyPolicy) PresentAddresses() (addresses []netip.Addr) {
	for _, r := range f.SNAT {
		addresses = append(addresses, r.Present...)
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses)
}

// CountSNATRules returns the number of entries of snatRules with an address on the node, and of those without one.
func (p Policy) CountSNATRules() (present, absent int) {
	found := map[int]bool{}
	for _, f := range p.Families {
		for _, r := range f.SNATRules() {
			found[r.Number] = found[r.Number] || len(r.Present) > 0
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

// HasPresentAddress reports whether the node has an address of snatAddresses or snatRules.
func (f FamilyPolicy) HasPresentAddress() bool {
	return slices.ContainsFunc(f.SNAT, func(r SNATRule) bool { return len(r.Present) > 0 })
}

// WithAddresses returns the policy on a node that has these addresses and no others.
func (p Policy) WithAddresses(addresses []netip.Addr) Policy {
	p.Families = slices.Clone(p.Families)
	for i := range p.Families {
		f := &p.Families[i]
		f.SNAT = slices.Clone(f.SNAT)
		for j := range f.SNAT {
			f.SNAT[j].setPresent(addresses)
		}
	}
	return p
}

// setPresent sets the addresses of an entry that the node has, of all of its addresses.
func (r *SNATRule) setPresent(addresses []netip.Addr) {
	r.Present = nil
	for _, a := range addresses {
		// Entries can be as wide as 0.0.0.0/0. The source address of a connection is never one of loopback or link-local.
		if a.IsGlobalUnicast() && r.Addresses.Contains(a) {
			r.Present = append(r.Present, a)
		}
	}
	slices.SortFunc(r.Present, netip.Addr.Compare)
	r.Present = slices.Compact(r.Present)
}

// WithAddresses returns the ruleset on a node that has these addresses and no others.
func (r Ruleset) WithAddresses(addresses []netip.Addr) Ruleset {
	p := r.Policy.WithAddresses(addresses)
	if p.samePresent(r.Policy) {
		return r
	}
	return Ruleset{Policy: p, Layout: r.Layout, Tables: r.Layout.Compile(p, r.Hash()), digest: r.digest}
}

// samePresent reports whether the node has the same addresses of snatAddresses and snatRules in both policies.
func (p Policy) samePresent(o Policy) bool {
	return slices.EqualFunc(p.Families, o.Families, func(a, b FamilyPolicy) bool {
		return slices.EqualFunc(a.SNAT, b.SNAT, func(a, b SNATRule) bool { return slices.Equal(a.Present, b.Present) })
	})
}

// HasSNAT reports whether the policy has snatAddresses or snatRules.
func (p Policy) HasSNAT() bool {
	return slices.ContainsFunc(p.Families, func(f FamilyPolicy) bool { return len(f.SNAT) > 0 })
}

// Absent returns those of Addresses of which the node has none.
func (r SNATRule) Absent() (absent []config.CIDR) {
	for _, c := range r.Addresses.CIDRs {
		if !slices.ContainsFunc(r.Present, c.Contains) {
			absent = append(absent, c)
		}
	}
	return absent
}

// buckets is the number of groups of pods: all whose addresses have the same last byte are one.
const buckets = 256

func bucketOf(pod netip.Addr) byte {
	b := pod.AsSlice()
	return b[len(b)-1]
}

// Address returns the one of Present from which connections of a pod leave, the zero address if there is none.
func (r SNATRule) Address(pod netip.Addr) netip.Addr { return r.assign()[bucketOf(pod)] }

// Mappings returns, for each last byte of a pod's address, the address from which connections of such pods leave. All
// other bytes of the keys are zero.
func (r SNATRule) Mappings() []nfnetlink.Mapping {
	mappings := make([]nfnetlink.Mapping, buckets)
	for i, a := range r.assign() {
		key := make([]byte, len(a.AsSlice()))
		key[len(key)-1] = byte(i)
		mappings[i].Key, _ = netip.AddrFromSlice(key)
		mappings[i].Value = a
	}
	return mappings
}

// assign returns the address of each bucket: the one that draws the highest number for it (rendezvous hashing). So if
// an address goes, only its own pods get another one, and if an address comes, pods change only to that. The numbers
// that an address draws must be the same in all versions and on all nodes.
func (r SNATRule) assign() (assigned [buckets]netip.Addr) {
	var highest [buckets]uint64
	for _, a := range r.Present {
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
