package iprange

import (
	"net/netip"
	"slices"
)

// All returns the addresses of a family.
func All(ipv6 bool) Range {
	if ipv6 {
		return FromPrefix(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
	}
	return FromPrefix(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
}

// SetOf returns the addresses that are in one of the prefixes.
func SetOf(prefixes []netip.Prefix) []Range {
	ranges := make([]Range, len(prefixes))
	for i, p := range prefixes {
		ranges[i] = FromPrefix(p)
	}
	return Normal(ranges)
}

// Normal turns ranges into a set, in place.
func Normal(ranges []Range) []Range {
	slices.SortFunc(ranges, func(a, b Range) int { return a.First.Compare(b.First) })
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

// Contains reports whether an address is in a set, by a binary search.
func Contains(set []Range, a netip.Addr) bool {
	i, _ := slices.BinarySearchFunc(set, a, func(r Range, a netip.Addr) int { return r.Last.Compare(a) })
	return i < len(set) && !a.Less(set[i].First)
}

// Intersect returns what is in both sets.
func Intersect(a, b []Range) []Range {
	var common []Range
	for len(a) > 0 && len(b) > 0 {
		r := a[0]
		if r.First.Less(b[0].First) {
			r.First = b[0].First
		}
		if b[0].Last.Less(r.Last) {
			r.Last = b[0].Last
		}
		if r.First.Compare(r.Last) <= 0 {
			common = append(common, r)
		}
		if a[0].Last.Less(b[0].Last) {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return common
}

// Subtract returns the part of a that is not in b.
func Subtract(a, b []Range) []Range {
	difference := make([]Range, 0, len(a)+len(b))
	for _, r := range a {
		for len(b) > 0 && b[0].Last.Less(r.First) {
			b = b[1:]
		}
		covered := false
		for _, cut := range b {
			if r.Last.Less(cut.First) {
				break
			}
			if r.First.Less(cut.First) {
				difference = append(difference, Range{First: r.First, Last: cut.First.Prev()})
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

// A Bound is one end of an interval as the kernel stores it: the first address of
// a range, or the first address after it. The zero Bound is the catch-all element
// *.
type Bound struct {
	Addr netip.Addr
	End  bool
}

// Pair turns the bounds of a set into ranges. Their order does not matter, and a
// dump may contain a bound twice. A range without an end extends to the last
// address of the family.
func Pair(bounds []Bound) []Range {
	slices.SortFunc(bounds, func(a, b Bound) int {
		if c := a.Addr.Compare(b.Addr); c != 0 || a.End == b.End {
			return c
		}
		if a.End {
			return -1
		}
		return 1
	})
	bounds = slices.Compact(bounds)
	ranges := make([]Range, 0, len(bounds)/2+1)
	for i, b := range bounds {
		switch {
		case b.End:
		case !b.Addr.IsValid():
			ranges = append(ranges, Range{})
		case i+1 < len(bounds):
			ranges = append(ranges, Range{First: b.Addr, Last: bounds[i+1].Addr.Prev()})
		default:
			ranges = append(ranges, Range{First: b.Addr, Last: FromPrefix(netip.PrefixFrom(b.Addr, 0)).Last})
		}
	}
	return ranges
}
