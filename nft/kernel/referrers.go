package kernel

import (
	"fmt"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
	"nft-masq-agent/nft/xtables"
)

// A chainID names a chain of a table.
type chainID struct {
	family       nfnetlink.Family
	table, chain string
}

// sayHeld says of chains that were to be deleted, and are only emptied, which rules of
// others keep them. It is asked after that: the jumps of ours are gone.
func (k *Kernel) sayHeld(held []chainID) []string {
	var out []string
	for _, c := range held {
		out = append(out, fmt.Sprintf("the rules of chain %s in table %s %s, which itself stays, empty, because of %s",
			nfnetlink.Printable(c.chain), c.family, nfnetlink.Printable(c.table), k.referrers(c)))
	}
	return out
}

// referrers names the rules that lead to a chain.
func (k *Kernel) referrers(to chainID) string {
	const few = 5
	var named []string
	leads := func(r nfnetlink.Rule) bool { target, _ := xtables.Target(r); return target == to.chain }
	_ = k.conn.EachRule(to.family, to.table, "", func(r nfnetlink.Rule) error {
		if leads(r) && len(named) < few {
			named = append(named, fmt.Sprintf("table %s %s, chain %s: %s", r.Family, nfnetlink.Printable(r.Table), nfnetlink.Printable(r.Chain), ruletext.String(r)))
		}
		return nil
	})
	if len(named) == 0 {
		return "a map of others that refers to it"
	}
	return strings.Join(named, "; ")
}

// held returns the chains that the way to the wanted ruleset empties and does not delete.
func (s *state) held(want nft.Ruleset) []chainID {
	var held []chainID
	for _, n := range s.nat {
		for _, name := range s.remove(&nfnetlink.Batch{}, n, want) {
			held = append(held, chainID{n.Family, xtables.NATTable, name})
		}
	}
	for _, l := range s.legacy {
		for _, name := range l.Held {
			held = append(held, chainID{l.Family, l.Table, name})
		}
	}
	return held
}

// remove plans the removal of chains of ours that are not wanted. It returns those
// that stay, empty.
func (s *state) remove(b *nfnetlink.Batch, n *xtables.Shared, want nft.Ruleset) (held []string) {
	t := natTable(want, n.Family)
	left := n.Leftovers(want.Chain(), t != nil)
	if len(left) == 0 {
		return nil
	}
	var kept []string
	if t != nil {
		kept = xtables.WithSubchains(want.Chain())
	}
	return n.Remove(b, left, kept, t == nil)
}
