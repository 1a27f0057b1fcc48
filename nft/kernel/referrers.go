package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
	"nft-masq-agent/nft/tables"
)

// A chainID names a chain of a table.
type chainID struct {
	family       nfnetlink.Family
	table, chain string
}

// busy adds to an error what the kernel does not tell with EBUSY: which rules
// lead to the chains that were to be deleted.
func (k *Kernel) busy(err error, want nft.Ruleset, look Look) error {
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	rules, readErr := again(func() ([]nfnetlink.Rule, error) {
		s, err := k.readRules(want, Look{Others: true, TakeOver: look.TakeOver})
		if err != nil {
			return nil, err
		}
		return k.referrers(s, want)
	})
	if readErr != nil || len(rules) == 0 {
		return err
	}
	const few = 5
	var named []string
	for _, r := range rules[:min(few, len(rules))] {
		named = append(named, fmt.Sprintf("table %s %s, chain %s: %s", r.Family, nfnetlink.Printable(r.Table), nfnetlink.Printable(r.Chain), ruletext.String(r)))
	}
	if more := len(rules) - few; more > 0 {
		named = append(named, fmt.Sprintf("%d more", more))
	}
	return fmt.Errorf("%w: rules of others lead to a chain that is to be deleted; delete them first: %s", err, strings.Join(named, "; "))
}

// referrers gives the rules that lead to chains that are to be deleted, and do not
// go with them.
func (k *Kernel) referrers(s *state, want nft.Ruleset) ([]nfnetlink.Rule, error) {
	chains, jumps := s.doomed(want)
	own := slices.Clone(chains)
	if want.Mode == nft.ModeIPTables {
		for _, name := range nft.WithSubchains(want.Chain) {
			own = append(own, chainID{nfnetlink.IPv4, nft.NATTable, name}, chainID{nfnetlink.IPv6, nft.NATTable, name})
		}
	}
	var places []chainID
	for _, c := range chains {
		if t := (chainID{c.family, c.table, ""}); !slices.Contains(places, t) {
			places = append(places, t)
		}
	}
	var found []nfnetlink.Rule
	for _, t := range places {
		rules, err := k.conn.Rules(t.family, t.table, "")
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			to, _ := tables.Target(r)
			goes := slices.Contains(own, chainID{r.Family, r.Table, r.Chain}) || slices.ContainsFunc(jumps, func(j nfnetlink.Rule) bool {
				return j.Family == r.Family && j.Table == r.Table && j.Chain == r.Chain && j.Handle == r.Handle
			})
			if !goes && slices.Contains(chains, chainID{r.Family, r.Table, to}) {
				found = append(found, r)
			}
		}
	}
	return found, nil
}

// doomed gives the chains that the way to the wanted ruleset deletes, and the
// rules elsewhere that it deletes with them.
func (s *state) doomed(want nft.Ruleset) (chains []chainID, jumps []nfnetlink.Rule) {
	for _, n := range s.nat {
		names, rules := n.Doomed(natTable(want, n.Family), want.Chain)
		for _, name := range names {
			chains = append(chains, chainID{n.Family, nft.NATTable, name})
		}
		jumps = append(jumps, rules...)
	}
	for _, l := range s.legacy {
		for _, name := range append([]string{l.Name}, l.SubChains...) {
			chains = append(chains, chainID{l.Family, l.Table, name})
		}
		jumps = append(jumps, l.Jumps...)
	}
	return chains, jumps
}
