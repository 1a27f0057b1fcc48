package config

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// strictCIDR parses a CIDR that needs neither an error nor a warning. Anything
// longer than maxQuoted cannot be one.
func strictCIDR(s string) (netip.Prefix, bool) {
	if s == "" || len(s) > maxQuoted {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(s)
	return p, err == nil && !p.Addr().Is4In6() && p == p.Masked()
}

// parseAddress parses an address, or a CIDR for all those within. The message is as
// that of [parseCIDR].
func parseAddress(s string) (netip.Prefix, string) {
	text, _, network := strings.Cut(s, "/")
	a, err := netip.ParseAddr(text)
	if err != nil || len(s) > maxQuoted {
		return netip.Prefix{}, fmt.Sprintf("%s is neither an address nor a CIDR: write one such as %q", quote(s), "198.51.100.11")
	}
	switch p, err := netip.ParsePrefix(s); {
	case network && err == nil && !a.Is4In6() && p != p.Masked():
		return p, fmt.Sprintf("%q has host bits set: write %q for the address, or %q for all addresses of the node in it", s, a, p.Masked())
	case network:
		return parseCIDR(s)
	case a.Zone() != "":
		return p, fmt.Sprintf("%q has a zone, which is not possible here: write %q", s, a.WithZone(""))
	case a.Is4In6():
		return p, fmt.Sprintf("%q is IPv4-mapped: write %q", s, a.Unmap())
	}
	return netip.PrefixFrom(a, a.BitLen()), ""
}

// parseCIDR parses a CIDR. The message explains what is wrong and what to write
// instead; it is empty if the CIDR is valid.
func parseCIDR(s string) (netip.Prefix, string) {
	p, ok := strictCIDR(s)
	if ok {
		return p, ""
	}
	if len(s) > maxQuoted {
		return p, fmt.Sprintf("%s is not a CIDR: write one such as %q", quote(s), "10.0.0.0/8")
	}
	addr, length, slash := strings.Cut(s, "/")
	if n, err := strconv.ParseUint(length, 10, 16); err == nil && length != strconv.FormatUint(n, 10) {
		return parseCIDR(fmt.Sprintf("%s/%d", addr, n)) // net.ParseCIDR accepts 10.0.0.0/08 as 10.0.0.0/8
	}
	if _, zone, ok := strings.Cut(length, "%"); ok {
		return p, fmt.Sprintf("%s has a zone, which no CIDR has: remove %q", quote(s), "%"+zone)
	}
	a, err := netip.ParseAddr(addr)
	switch {
	case err != nil:
	case a.Zone() != "":
		return p, fmt.Sprintf("%q has a zone, which no CIDR has: remove %q", s, "%"+a.Zone())
	case a.Is4In6() && slash && p.Bits() < 96:
		return p, fmt.Sprintf("%q is IPv4-mapped: write the IPv4 network", s)
	case a.Is4In6():
		bits := 32
		if slash {
			bits = p.Bits() - 96
		}
		return p, fmt.Sprintf("%q is IPv4-mapped: write %q", s, netip.PrefixFrom(a.Unmap(), bits).Masked())
	case !slash:
		return p, fmt.Sprintf("%q is an address, not a CIDR: write %q", s, netip.PrefixFrom(a, a.BitLen()))
	case p.IsValid():
		return p, fmt.Sprintf("%q has host bits set: write %q", s, p.Masked())
	default:
		return p, fmt.Sprintf("%s has an invalid prefix length: must be from 0 to %d", quote(s), a.BitLen())
	}
	return p, fmt.Sprintf("%s is not a CIDR: write one such as %q", quote(s), "10.0.0.0/8")
}
