package judge

import (
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// matches reports whether the entry is for connections between two addresses, by the
// right interface.
func matches(r nft.SNATRule, src, dst netip.Addr) bool {
	return (len(r.Sources.CIDRs) == 0 || r.Sources.Contains(src)) &&
		(len(r.Destinations.CIDRs) == 0 || r.Destinations.Contains(dst))
}

// leaves reports whether the entry is for connections that leave by an interface.
func leaves(r nft.SNATRule, name string) bool {
	matches := func(i config.Interface) bool { return i.Matches(name) }
	return len(r.Interfaces) == 0 || slices.ContainsFunc(r.Interfaces, matches)
}

// SourceAddress returns the address from which a masqueraded connection of a pod leaves, and the entry that names it:
// the first one that matches and of which the node has an address. Without one, the address is not valid: then it is
// that of the interface.
func SourceAddress(p nft.Policy, c nft.Connection) (netip.Addr, nft.SNATRule) {
	f, _ := p.Family(c.Dst.Is6())
	for _, r := range f.SNAT {
		if len(r.Present) > 0 && matches(r, c.Src, c.Dst) && leaves(r, c.OutInterface) {
			return r.Address(c.Src), r
		}
	}
	return netip.Addr{}, nft.SNATRule{}
}

// AllowsSource reports whether a masqueraded connection between two addresses may have left
// from an address, by some interface. One that a pod got while the node had other addresses
// stays right as long as the node has it. onNode is whether it does: masquerading also
// chooses addresses that are in a list but never used for it, the temporary ones of IPv6.
func AllowsSource(f nft.FamilyPolicy, src, dst, address netip.Addr, onNode bool) bool {
	lost := false
	for _, r := range f.SNAT {
		present := slices.Contains(r.Present, address)
		if !present && r.Addresses.Contains(address) {
			lost = true
		}
		if len(r.Present) == 0 || !matches(r, src, dst) {
			continue
		}
		if present {
			return true
		}
		if len(r.Interfaces) == 0 {
			return false
		}
	}
	// No entry decides, so masquerading chose the address, unless a list names it and the node has lost it.
	return onNode || !lost
}

// MissesAddress reports whether the first connection from a source that an entry is for gets no address of snatRules: the
// node has none of the entry, nor of another one that is for it.
func MissesAddress(p nft.Policy, r nft.SNATRule, src netip.Addr) bool {
	c := nft.Connection{Src: src, Dst: Everything(src.Is6()).Addr()}
	if len(r.Destinations.CIDRs) > 0 {
		c.Dst = r.Destinations.Prefixes()[0].Addr()
	}
	if len(r.Interfaces) > 0 {
		c.OutInterface = r.Interfaces[0].Name
	}
	if c.Dst.Is6() != src.Is6() || !matches(r, c.Src, c.Dst) {
		return false
	}
	_, rule := SourceAddress(p, c)
	return rule.Number == 0
}
