package iprange

import (
	"net/netip"
	"slices"
)

// A Bound is one end of an interval as the kernel keeps it: the first address
// of a run, or the first address behind it; the zero Bound is the element *.
type Bound struct {
	Addr netip.Addr
	End  bool
}

// Pair makes ranges of the bounds of a set, whatever their order, and though a
// dump may give one twice. A run without an end goes on to the last address of
// the family.
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
			out = append(out, Range{From: b.Addr, To: lastAddr(b.Addr)})
		}
	}
	return out
}

func lastAddr(a netip.Addr) netip.Addr {
	return Of(netip.PrefixFrom(a, 0)).To
}
