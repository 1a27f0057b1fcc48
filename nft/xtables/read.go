package xtables

import (
	"fmt"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A State is our chain in the shared tables of iptables-nft, as the kernel has it, and
// the wanted one. It implements [nft.KernelState].
type State struct {
	name   string   // of the wanted chain
	hash   string   // of the wanted policy
	tables []*table // for each wanted table; none in another mode
}

// A table is a shared table as the kernel has it: what of it is ours, or leads to it.
type table struct {
	nfnetlink.Table
	want       nft.Table // what of it is to be ours
	exists     bool
	post       *nfnetlink.Chain // POSTROUTING, nil if there is none
	jumps      []nfnetlink.Rule // of POSTROUTING, to our chain
	otherRules int              // the number of the other rules of POSTROUTING
	chain      *chain           // nil if there is none
}

// A chain is the chain with our chain's name in a shared table, whoever wrote it.
type chain struct {
	nfnetlink.Chain
	rules  []nfnetlink.Rule // not many more than are wanted
	total  int              // the number of its rules, as far as they were read
	signed bool             // a rule has our signature
	hash   string           // of the policy, from the rule that has it
}

// slack is the number of unexpected rules that are read and listed, because other
// programs can add more than fits our memory.
const slack = 5_000

// Read reads the chains with the name of the wanted one, and the jumps to them. Chains that we left under other names
// are found by [FindOlder]. It reads everything at any depth and at each attempt, because that is little.
func Read(c *nfnetlink.Conn, want, _ nft.Ruleset, _ nft.Depth, _ nft.KernelState) (nft.KernelState, error) {
	s := &State{}
	if want.Mode() != nft.ModeIPTables {
		return s, nil
	}
	s.name = want.Chain()
	s.hash = want.Hash()
	for _, wanted := range want.Tables {
		t := &table{want: wanted}
		if err := s.read(c, t); err != nil {
			return nil, fmt.Errorf("read table %s nat: %w", wanted.Family, err)
		}
		s.tables = append(s.tables, t)
	}
	return s, nil
}

func (s *State) read(c *nfnetlink.Conn, t *table) error {
	found, err := c.Table(t.want.Family, NATTable)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	t.Table = found
	t.exists = true
	if err := s.readPostrouting(c, t); err != nil {
		return err
	}
	if err := s.readChain(c, t); err != nil {
		return fmt.Errorf("chain %s: %w", nfnetlink.Quote(s.name), err)
	}
	return nil
}

// readPostrouting reads the rules of POSTROUTING that lead to our chain. There can be tens of thousands of others.
func (s *State) readPostrouting(c *nfnetlink.Conn, t *table) error {
	post, err := c.Chain(t.Family, NATTable, Postrouting)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("chain POSTROUTING: %w", err)
	}
	t.post = &post
	return c.EachRule(t.Family, NATTable, Postrouting, func(r nfnetlink.Rule) error {
		if s.leads(r) {
			t.jumps = append(t.jumps, r)
		} else {
			t.otherRules++
		}
		return nil
	})
}

// hasUnlistedRules reports whether POSTROUTING has rules that the kernel did not list.
func (t *table) hasUnlistedRules() bool {
	return t.post != nil && len(t.jumps)+t.otherRules < int(t.post.Use)
}

// readChain reads our chain, but not many more rules than are wanted.
func (s *State) readChain(c *nfnetlink.Conn, t *table) error {
	head, err := c.Chain(t.Family, NATTable, s.name)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	found := &chain{Chain: head}
	limit := len(t.want.Chain(s.name).Rules) + slack
	err = c.EachRule(t.Family, NATTable, s.name, func(r nfnetlink.Rule) error {
		found.total++
		if found.total > limit {
			return nfnetlink.ErrEnough
		}
		found.rules = append(found.rules, r)
		found.signed = found.signed || r.Signed()
		if hash := r.Hash(); hash != "" {
			found.hash = hash
		}
		return nil
	})
	if err != nil {
		return err
	}
	t.chain = found
	return nil
}

// Installed implements [nft.KernelState].
func (s *State) Installed() (nft.Installed, bool) {
	for _, t := range s.tables {
		if t.chain != nil && t.chain.signed && len(t.jumps) > 0 {
			return nft.Installed{Layout: Layout{ChainName: s.name}, Hash: t.chain.hash}, true
		}
	}
	return nft.Installed{}, false
}

// leads reports whether a rule jumps to our chain.
func (s *State) leads(r nfnetlink.Rule) bool {
	target, _ := r.Target()
	return target == s.name
}
