package judge

import (
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Everything returns the network of all addresses of a family.
func Everything(ipv6 bool) netip.Prefix {
	if ipv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// Uncovered returns the first address of a network that is not in a list; false: the list covers it.
func Uncovered(network netip.Prefix, list nft.List) (netip.Addr, bool) {
	a := network.Addr()
	for network.Contains(a) {
		p, found := list.Covering(a)
		if !found {
			return a, true
		}
		a = nfnetlink.PrefixRange(p).Last.Next()
	}
	return netip.Addr{}, false
}

// MasqueradedDestination returns an address to which a policy masquerades connections from some source, by the right
// interfaces; false: it masquerades none.
func MasqueradedDestination(f nft.FamilyPolicy) (netip.Addr, bool) {
	sources := f.List(config.KeyMasqueradeSrcCIDRs).Prefixes()
	if len(sources) == 0 {
		sources = []netip.Prefix{Everything(f.IPv6)}
	}
	masqueraded := slices.ContainsFunc(sources, func(p netip.Prefix) bool {
		_, found := Uncovered(p, f.List(config.KeyNonMasqueradeSrcCIDRs))
		return found
	})
	if !masqueraded {
		return netip.Addr{}, false
	}
	forced := f.List(config.KeyForceMasqueradeCIDRs).Prefixes()
	if len(forced) > 0 {
		return forced[0].Addr(), true
	}
	return Uncovered(Everything(f.IPv6), f.List(config.KeyNonMasqueradeCIDRs))
}
