package iprange

import (
	"net/netip"
	"slices"
)

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
