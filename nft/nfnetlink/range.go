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
	if p, ok := r.Prefix(); ok {
		if p.IsSingleIP() {
			return p.Addr().String()
		}
		return p.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

// Prefix returns the range as a prefix, and whether it is one.
func (r Range) Prefix() (netip.Prefix, bool) {
	parts := r.Prefixes()
	if len(parts) != 1 || PrefixRange(parts[0]) != r {
		return netip.Prefix{}, false
	}
	return parts[0], true
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

// Prefixes returns the smallest list of prefixes that covers exactly the range.
func (r Range) Prefixes() []netip.Prefix {
	var prefixes []netip.Prefix
	for start := r.First; start.IsValid() && !r.Last.Less(start); {
		bits := start.BitLen()
		for bits > 0 {
			wider := netip.PrefixFrom(start, bits-1)
			if wider.Masked().Addr() != start || r.Last.Less(PrefixRange(wider).Last) {
				break
			}
			bits--
		}
		p := netip.PrefixFrom(start, bits)
		prefixes = append(prefixes, p)
		start = PrefixRange(p).Last.Next()
	}
	return prefixes
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
