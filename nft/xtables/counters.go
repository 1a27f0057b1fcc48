package xtables

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Counters reads the number of connections by verdict from the rules of a chain; nothing
// if there are none. It does not count connections to this node, nor those that reach the
// end of the chain because masqueradeSrcCIDRs does not contain their source. A deleted
// rule loses its count.
func Counters(c *nfnetlink.Conn, chain string) ([]nft.Counts, error) {
	var found []nft.Counts
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		exempt := nft.Counts{IPv6: f == nfnetlink.IPv6, Verdict: nft.Exempt}
		masqueraded := nft.Counts{IPv6: exempt.IPv6, Verdict: nft.Masqueraded}
		present := false
		for _, name := range WithSubchains(chain) {
			err := c.EachRule(f, NATTable, name, func(r nfnetlink.Rule) error {
				present = true
				packets, _ := r.Packets()
				if masquerades, _ := r.NAT(); masquerades {
					masqueraded.Packets += packets
				} else if r.Returns() {
					exempt.Packets += packets
				}
				return nil
			})
			if err != nil && !nfnetlink.IsNotExist(err) {
				return nil, err
			}
		}
		if present {
			found = append(found, exempt, masqueraded)
		}
	}
	return found, nil
}
