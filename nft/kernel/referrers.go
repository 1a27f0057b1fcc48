package kernel

import (
	"fmt"
	"strings"

	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// sayEmptied says of chains that were to be deleted, and are only emptied, which rules of
// others keep them. It is asked after that: the jumps of ours are gone.
func (k *Kernel) sayEmptied(emptied []layout.ChainID) []string {
	var out []string
	for _, c := range emptied {
		out = append(out, fmt.Sprintf("the rules of chain %s in table %s %s, which itself stays, empty, because of %s",
			nfnetlink.Printable(c.Chain), c.Family, nfnetlink.Printable(c.Table), k.referrers(c)))
	}
	return out
}

// referrers names the rules that lead to a chain.
func (k *Kernel) referrers(to layout.ChainID) string {
	const few = 5
	var named []string
	leads := func(r nfnetlink.Rule) bool { target, _ := rule.Target(r); return target == to.Chain }
	_ = k.conn.EachRule(to.Family, to.Table, "", func(r nfnetlink.Rule) error {
		if leads(r) && len(named) < few {
			named = append(named, fmt.Sprintf("table %s %s, chain %s: %s", r.Family, nfnetlink.Printable(r.Table), nfnetlink.Printable(r.Chain), rule.String(r)))
		}
		return nil
	})
	if len(named) == 0 {
		return "a map of others that refers to it"
	}
	return strings.Join(named, "; ")
}
