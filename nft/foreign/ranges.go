package foreign

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// Sets of addresses are sorted ranges that do not overlap. IPv4 sorts before
// IPv6, so one set can hold both.

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

// normal sorts ranges and merges those that overlap.
func normal(ranges []iprange.Range) []iprange.Range {
	slices.SortFunc(ranges, func(a, b iprange.Range) int { return a.From.Compare(b.From) })
	out := ranges[:0]
	for _, r := range ranges {
		if last := len(out) - 1; last >= 0 && r.From.Compare(out[last].To) <= 0 {
			if r.To.Compare(out[last].To) > 0 {
				out[last].To = r.To
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

func intersect(a, b []iprange.Range) []iprange.Range {
	var out []iprange.Range
	for len(a) > 0 && len(b) > 0 {
		r := iprange.Range{From: later(a[0].From, b[0].From), To: a[0].To}
		if b[0].To.Less(r.To) {
			r.To = b[0].To
		}
		if r.From.Compare(r.To) <= 0 {
			out = append(out, r)
		}
		if a[0].To.Less(b[0].To) {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

func later(a, b netip.Addr) netip.Addr {
	if a.Less(b) {
		return b
	}
	return a
}

// subtract returns the part of a that is not in b.
func subtract(a, b []iprange.Range) []iprange.Range {
	var out []iprange.Range
	for _, r := range a {
		for len(b) > 0 && b[0].To.Less(r.From) {
			b = b[1:]
		}
		covered := false
		for _, cut := range b {
			if r.To.Less(cut.From) {
				break
			}
			if r.From.Less(cut.From) {
				out = append(out, iprange.Range{From: r.From, To: cut.From.Prev()})
			}
			if covered = !cut.To.Less(r.To); covered {
				break
			}
			r.From = cut.To.Next()
		}
		if !covered {
			out = append(out, r)
		}
	}
	return out
}

// covers reports whether a set contains all of part. The nil set contains everything.
func covers(set, part []iprange.Range) bool { return set == nil || len(subtract(part, set)) == 0 }
