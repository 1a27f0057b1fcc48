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
