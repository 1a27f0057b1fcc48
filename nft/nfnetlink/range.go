package nfnetlink

import (
	"net/netip"
	"slices"
)

// A Range is a range of addresses, both ends included. The zero Range is a set's
// catch-all element, which nft writes as *.
type Range struct{ First, Last netip.Addr }

// String returns the range as an address or prefix if it is one, otherwise as
// FROM-TO.
func (r Range) String() string {
	if r == (Range{}) {
		return "*"
	}
	for bits := range r.First.BitLen() {
		if p := netip.PrefixFrom(r.First, bits); PrefixRange(p) == r {
			return p.String()
		}
	}
	if r.First == r.Last {
		return r.First.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

// PrefixRange returns the addresses of a prefix.
func PrefixRange(p netip.Prefix) Range {
	p = p.Masked()
	last := p.Addr().As16()
	bits := p.Bits() + 128 - p.Addr().BitLen()
	host := byte(0xff >> (bits % 8))
	for i := bits / 8; i < len(last); i++ {
		last[i] |= host
		host = 0xff
	}
	end := netip.AddrFrom16(last)
	if p.Addr().Is4() {
		end = end.Unmap()
	}
	return Range{p.Addr(), end}
}

// A Bound is one end of an interval as the kernel stores it: the first address of
// a range, or the first address after it. The zero Bound is the catch-all element
// *.
type Bound struct {
	Addr netip.Addr
	End  bool
}

// Ranges turns the bounds of a set into ranges. Their order does not matter, and a
// dump may contain a bound twice. A range without an end extends to the last
// address of the family.
func Ranges(bounds []Bound) []Range {
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
			ranges = append(ranges, Range{First: b.Addr, Last: PrefixRange(netip.PrefixFrom(b.Addr, 0)).Last})
		}
	}
	return ranges
}
