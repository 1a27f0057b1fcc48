package iprange

import (
	"net/netip"
	"slices"
)

// All returns the addresses of a family.
func All(ipv6 bool) Range {
	if ipv6 {
		return Of(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
	}
	return Of(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
}

// SetOf returns the addresses that are in one of the prefixes.
func SetOf(prefixes []netip.Prefix) []Range {
	ranges := make([]Range, len(prefixes))
	for i, p := range prefixes {
		ranges[i] = Of(p)
	}
	return Normal(ranges)
}

// Normal turns ranges into a set, in place.
func Normal(ranges []Range) []Range {
	slices.SortFunc(ranges, func(a, b Range) int { return a.From.Compare(b.From) })
	out := ranges[:0]
	for _, r := range ranges {
		last := len(out) - 1
		switch {
		case last < 0 || out[last].To.Less(r.From) && out[last].To.Next() != r.From:
			out = append(out, r)
		case out[last].To.Less(r.To):
			out[last].To = r.To
		}
	}
	return out
}

// Prefixes returns the smallest list of prefixes that covers exactly a set.
func Prefixes(set []Range) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range set {
		out = append(out, r.Prefixes()...)
	}
	return out
}

// Contains reports whether an address is in a set, by a binary search.
func Contains(set []Range, a netip.Addr) bool {
	i, _ := slices.BinarySearchFunc(set, a, func(r Range, a netip.Addr) int { return r.To.Compare(a) })
	return i < len(set) && !a.Less(set[i].From)
}

// Intersect returns what is in both sets.
func Intersect(a, b []Range) []Range {
	var out []Range
	for len(a) > 0 && len(b) > 0 {
		r := a[0]
		if r.From.Less(b[0].From) {
			r.From = b[0].From
		}
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

// Subtract returns the part of a that is not in b.
func Subtract(a, b []Range) []Range {
	out := make([]Range, 0, len(a)+len(b))
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
				out = append(out, Range{From: r.From, To: cut.From.Prev()})
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
	out := make([]Range, 0, len(bounds)/2+1)
	for i, b := range bounds {
		switch {
		case b.End:
		case !b.Addr.IsValid():
			out = append(out, Range{})
		case i+1 < len(bounds):
			out = append(out, Range{From: b.Addr, To: bounds[i+1].Addr.Prev()})
		default:
			out = append(out, Range{From: b.Addr, To: Of(netip.PrefixFrom(b.Addr, 0)).To})
		}
	}
	return out
}
