// Package iprange represents ranges of IP addresses, sets of addresses, and the bounds
// by which the kernel stores those of a set.
//
// A set is a slice of ranges, sorted, of which none overlaps or touches another. IPv4
// sorts before IPv6, so one set can hold both.
package iprange

import "net/netip"

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
	if len(parts) != 1 || FromPrefix(parts[0]) != r {
		return netip.Prefix{}, false
	}
	return parts[0], true
}

// FromPrefix returns the addresses of a prefix.
func FromPrefix(p netip.Prefix) Range {
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
			if wider.Masked().Addr() != start || r.Last.Less(FromPrefix(wider).Last) {
				break
			}
			bits--
		}
		p := netip.PrefixFrom(start, bits)
		prefixes = append(prefixes, p)
		start = FromPrefix(p).Last.Next()
	}
	return prefixes
}
