package kernel

import (
	"fmt"
	"strings"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// emptied describes, for chains that were emptied but could not be deleted, which rules of
// other programs refer to them. Call it afterwards, when our own jumps are gone.
func (k *Kernel) emptied(diffs []layout.Difference) (out []string) {
	for _, d := range diffs {
		for _, c := range d.Emptied {
			out = append(out, fmt.Sprintf("the rules of chain %s in table %s %s, which itself stays, empty, because of %s",
				nfnetlink.Printable(c.Name), c.Family, nfnetlink.Printable(c.Table), k.referrers(c)))
		}
	}
	return out
}

// referrers describes the rules that jump to a chain.
func (k *Kernel) referrers(to nfnetlink.ChainID) string {
	const few = 5
	var named []string
	leads := func(r nfnetlink.Rule) bool { target, _ := facts.Target(r); return target == to.Name }
	_ = k.conn.EachRule(to.Family, to.Table, "", func(r nfnetlink.Rule) error {
		if leads(r) && len(named) < few {
			named = append(named, fmt.Sprintf("table %s %s, chain %s: %s", r.Family, nfnetlink.Printable(r.Table),
				nfnetlink.Printable(r.Chain), k.words.Of(r)))
		}
		return nil
	})
	if len(named) == 0 {
		return "another program's map that refers to it"
	}
	return strings.Join(named, "; ")
}
