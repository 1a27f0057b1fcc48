package judge

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/nfnetlink"
)

// Addresses are a set of addresses: ranges in order, of which none overlaps or touches
// another. IPv4 sorts before IPv6, so a set can hold both.
type Addresses []nfnetlink.Range

// NewAddresses returns the addresses that are in one of the prefixes.
func NewAddresses(prefixes []netip.Prefix) Addresses {
	ranges := make([]nfnetlink.Range, len(prefixes))
	for i, p := range prefixes {
		ranges[i] = nfnetlink.PrefixRange(p)
	}
	return merge(ranges)
}

// AllAddresses returns the addresses of a family.
func AllAddresses(ipv6 bool) Addresses {
	unspecified := netip.IPv4Unspecified()
	if ipv6 {
		unspecified = netip.IPv6Unspecified()
	}
	return Addresses{nfnetlink.PrefixRange(netip.PrefixFrom(unspecified, 0))}
}

// merge makes a set of ranges, in place.
func merge(ranges []nfnetlink.Range) Addresses {
	slices.SortFunc(ranges, func(a, b nfnetlink.Range) int { return a.First.Compare(b.First) })
	set := ranges[:0]
	for _, r := range ranges {
		last := len(set) - 1
		switch {
		case last < 0 || set[last].Last.Less(r.First) && set[last].Last.Next() != r.First:
			set = append(set, r)
		case set[last].Last.Less(r.Last):
			set[last].Last = r.Last
		}
	}
	return set
}

// Contain reports whether an address is in the set, by a binary search.
func (s Addresses) Contain(a netip.Addr) bool {
	i, _ := slices.BinarySearchFunc(s, a, func(r nfnetlink.Range, a netip.Addr) int { return r.Last.Compare(a) })
	return i < len(s) && !a.Less(s[i].First)
}

// Union returns what is in one of the sets.
func (s Addresses) Union(o Addresses) Addresses { return merge(slices.Concat(s, o)) }

// Intersect returns what is in both sets.
func (s Addresses) Intersect(o Addresses) Addresses { return s.Subtract(s.Subtract(o)) }

// Subtract returns the part of the set that is not in another one.
func (s Addresses) Subtract(o Addresses) Addresses {
	difference := make(Addresses, 0, len(s)+len(o))
	for _, r := range s {
		for len(o) > 0 && o[0].Last.Less(r.First) {
			o = o[1:]
		}
		covered := false
		for _, cut := range o {
			if r.Last.Less(cut.First) {
				break
			}
			if r.First.Less(cut.First) {
				difference = append(difference, nfnetlink.Range{First: r.First, Last: cut.First.Prev()})
			}
			covered = !cut.Last.Less(r.Last)
			if covered {
				break
			}
			r.First = cut.Last.Next()
		}
		if !covered {
			difference = append(difference, r)
		}
	}
	return difference
}
