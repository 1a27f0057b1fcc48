// Package iprange represents ranges of IP addresses, sets of addresses, and the bounds
// by which the kernel stores those of a set.
//
// A set is a slice of ranges, sorted, of which none overlaps or touches another. IPv4
// sorts before IPv6, so one set can hold both.
package iprange

import "net/netip"

// A Range is a range of addresses, both ends included. The zero Range is a set's
// catch-all element, which nft writes as *.
type Range struct{ From, To netip.Addr }

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
	return r.From.String() + "-" + r.To.String()
}

// Prefix returns the range as a prefix, and whether it is one.
func (r Range) Prefix() (netip.Prefix, bool) {
	parts := r.Prefixes()
	if len(parts) != 1 || Of(parts[0]) != r {
		return netip.Prefix{}, false
	}
	return parts[0], true
}

// Of returns the addresses of a prefix.
func Of(p netip.Prefix) Range {
	p = p.Masked()
	last := p.Addr().As16()
	bits := p.Bits() + 128 - p.Addr().BitLen()
	for i, host := bits/8, byte(0xff>>(bits%8)); i < len(last); i, host = i+1, 0xff {
		last[i] |= host
	}
	to := netip.AddrFrom16(last)
	if p.Addr().Is4() {
		to = to.Unmap()
	}
	return Range{p.Addr(), to}
}

// Prefixes returns the smallest list of prefixes that covers exactly the range.
func (r Range) Prefixes() []netip.Prefix {
	var out []netip.Prefix
	for from := r.From; from.IsValid() && !r.To.Less(from); {
		bits := from.BitLen()
		for bits > 0 {
			wider := netip.PrefixFrom(from, bits-1)
			if wider.Masked().Addr() != from || r.To.Less(Of(wider).To) {
				break
			}
			bits--
		}
		p := netip.PrefixFrom(from, bits)
		out = append(out, p)
		from = Of(p).To.Next()
	}
	return out
}
