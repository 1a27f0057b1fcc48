package nft

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"nft-masq-agent/nft/nfnetlink"
)

// A SNAT is the addresses that masqueraded connections of a family leave from. The zero
// value is masquerading: each leaves from the address of its interface.
type SNAT struct {
	List
	// Present are those that the node has, sorted. They are no part of what is decided:
	// the same config serves all nodes.
	Present []netip.Addr
}

// On returns the policy on a node that has these addresses and no others.
func (p Policy) On(addresses []netip.Addr) Policy {
	p.Families = slices.Clone(p.Families)
	for i := range p.Families {
		f := &p.Families[i]
		f.SNAT.Present = nil
		for _, a := range addresses {
			if a.IsGlobalUnicast() && a.Is6() == f.IPv6 && f.SNAT.has(a) {
				f.SNAT.Present = append(f.SNAT.Present, a)
			}
		}
		slices.SortFunc(f.SNAT.Present, netip.Addr.Compare)
		f.SNAT.Present = slices.Compact(f.SNAT.Present)
	}
	return p
}

// On returns the ruleset on a node that has these addresses and no others.
func (r Ruleset) On(addresses []netip.Addr) Ruleset {
	p := r.Policy.On(addresses)
	if p.samePresent(r.Policy) {
		return r
	}
	return CompilePolicy(p, r.Layout)
}

// samePresent reports whether the node has the same of snatAddresses.
func (p Policy) samePresent(o Policy) bool {
	return slices.EqualFunc(p.Families, o.Families, func(a, b FamilyPolicy) bool { return slices.Equal(a.SNAT.Present, b.SNAT.Present) })
}

// HasSNAT reports whether the policy has snatAddresses.
func (p Policy) HasSNAT() bool {
	return slices.ContainsFunc(p.Families, func(f FamilyPolicy) bool { return len(f.SNAT.CIDRs) > 0 })
}

// SNATOf returns the addresses of a family.
func (p Policy) SNATOf(ipv6 bool) SNAT {
	f, _ := p.family(ipv6)
	return f.SNAT
}

func (s SNAT) has(a netip.Addr) bool {
	_, found := s.find(a)
	return found
}

// Allows reports whether a masqueraded connection may have left from an address. One
// that a pod got while the node had other addresses stays right as long as the node has
// it.
func (s SNAT) Allows(from netip.Addr) bool {
	if len(s.Present) == 0 {
		return !s.has(from) // the node does not have it
	}
	return slices.Contains(s.Present, from)
}

// Absent counts the entries of the list of which the node has no address.
func (s SNAT) Absent() int {
	n := 0
	for _, c := range s.CIDRs {
		if !slices.ContainsFunc(s.Present, c.Contains) {
			n++
		}
	}
	return n
}

// buckets is into how many groups pods fall, by the last byte of their address.
const buckets = 256

func bucketOf(pod netip.Addr) byte {
	b := pod.AsSlice()
	return b[len(b)-1]
}

// Of returns the address that connections of a pod leave from; false if they are
// masqueraded.
func (s SNAT) Of(pod netip.Addr) (netip.Addr, bool) {
	if len(s.Present) == 0 {
		return netip.Addr{}, false
	}
	return s.assign()[bucketOf(pod)], true
}

// Mappings returns the last byte of a pod's address, alone, with the address that
// connections of such pods leave from.
func (s SNAT) Mappings() []nfnetlink.Mapping {
	out := make([]nfnetlink.Mapping, buckets)
	for i, a := range s.assign() {
		key := make([]byte, len(a.AsSlice()))
		key[len(key)-1] = byte(i)
		out[i].Key, _ = netip.AddrFromSlice(key)
		out[i].Value = a
	}
	return out
}

// assign chooses the address of each bucket: the one that draws the highest number for
// it (rendezvous hashing). So an address that goes moves only its own pods, and one that
// comes moves no pod but to itself. What an address draws must be the same in all
// versions and on all nodes.
func (s SNAT) assign() (of [buckets]netip.Addr) {
	var highest [buckets]uint64
	for _, a := range s.Present {
		var seed [32]byte
		copy(seed[:], a.AsSlice())
		draw := rand.NewChaCha8(seed)
		for b := range of {
			if n := draw.Uint64(); n > highest[b] || !of[b].IsValid() {
				highest[b], of[b] = n, a
			}
		}
	}
	return of
}
