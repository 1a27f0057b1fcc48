package xtables

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Counters reads the number of connections by verdict from the counters of a chain's rules; none if it has no rules.
// Connections to this node do not count, and a deleted rule loses its count.
func Counters(c *nfnetlink.Conn, chain string) ([]nft.Counts, error) {
	var counts []nft.Counts
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		exempt := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Exempt}
		masqueraded := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Masqueraded}
		present := false
		err := c.EachRule(f, NATTable, chain, func(r nfnetlink.Rule) error {
			present = true
			packets, _ := r.Packets()
			if r.TranslatesSources() {
				masqueraded.Packets += packets
			} else if r.Returns() {
				exempt.Packets += packets
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		if present {
			counts = append(counts, exempt, masqueraded)
		}
	}
	return counts, nil
}
