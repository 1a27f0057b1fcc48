package foreign

import (
	"net/netip"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

var (
	everyIPv4 = iprange.Of(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	everyIPv6 = iprange.Of(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
)

// anywhere returns all addresses of a family; inet includes both families.
func anywhere(f nfnetlink.Family) []iprange.Range {
	switch f {
	case nfnetlink.IPv4:
		return []iprange.Range{everyIPv4}
	case nfnetlink.IPv6:
		return []iprange.Range{everyIPv6}
	}
	return []iprange.Range{everyIPv4, everyIPv6}
}

// only reports whether all addresses of a set are of one of the two families.
func only(f nfnetlink.Family, set []iprange.Range) bool {
	if f == nfnetlink.IPv4 {
		return len(set) == 0 || set[len(set)-1].From.Is4()
	}
	return len(set) == 0 || set[0].From.Is6()
}

// covers reports whether a set contains all of part. The nil set contains everything.
func covers(set, part []iprange.Range) bool {
	return set == nil || len(iprange.Subtract(part, set)) == 0
}
