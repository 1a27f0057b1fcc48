package judge_test

import (
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

func policyOf(c config.Config) nft.Policy {
	return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
}

// extremes adds lists that a random config rarely has: of everything, and of nothing
// that is left.
func extremes(m cases.Maker, c config.Config) config.Config {
	for _, list := range []*[]config.CIDR{
		&c.NonMasqueradeCIDRs, &c.ForceMasqueradeCIDRs, &c.NonMasqueradeSrcCIDRs, &c.MasqueradeSrcCIDRs,
	} {
		if m.IntN(12) == 0 {
			*list = append(slices.Clone(*list), cases.CIDRs("0.0.0.0/0", "::/0")...)
		}
	}
	if m.IntN(12) == 0 {
		c.NonMasqueradeOutInterfaces = c.MasqueradeOutInterfaces
	}
	return c
}

// someConnections returns connections of a family at the edges of the lists of two configs.
func someConnections(m cases.Maker, ipv6 bool, before, after config.Config) []nft.Connection {
	all := make([]nft.Connection, 20)
	for i := range all {
		c := m.Connection(m.Near(before, ipv6), m.Near(after, ipv6))
		if m.IntN(2) == 0 {
			c.Src, c.Dst = c.Dst, c.Src
		}
		switch m.IntN(8) {
		case 0:
			c.ToNode = true
		case 1:
			c.InInterface, c.OutInterface = "", ""
		}
		all[i] = c
	}
	return all
}
