package xtables

import (
	"fmt"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A State is our chains in the shared tables of iptables-nft, as the kernel has them, and
// the wanted ones. It implements [nft.KernelState].
type State struct {
	chain  string    // the wanted one
	hash   string    // of the wanted policy
	shared []*shared // for each wanted table; none in another mode
}

// A shared is a shared table as the kernel has it: what of it is ours, or leads to it.
type shared struct {
	nfnetlink.Table
	want   nft.Table // what of it is to be ours
	exists bool
	post   *nfnetlink.Chain // POSTROUTING, nil if there is none
	jumps  []nfnetlink.Rule // of POSTROUTING, to our chain, or with the comment of our jump
	others int              // the number of its other rules
	chains map[string]*ourChain
}

// An ourChain is a chain of a shared table that has the name of one of ours.
type ourChain struct {
	nfnetlink.Chain
	rules   []nfnetlink.Rule // the first ones
	total   int              // the number of rules that were read
	signed  bool             // we wrote some of them
	targets map[string]int   // the number of rules that lead to each chain
	hash    string           // of the policy, from the rule that has it
}

func (n *shared) id(chain string) nfnetlink.ChainID {
	return nfnetlink.ChainID{Family: n.want.Family, Table: NATTable, Name: chain}
}

// slack is the number of unexpected rules that are read and listed, because other
// programs can add more than fits our memory.
const slack = 5_000

// Read reads the chains that have the names of the wanted ones. What we left under other names is
// the matter of package older.
func Read(c *nfnetlink.Conn, want, _ nft.Ruleset, _ nft.Depth, _ nft.KernelState) (nft.KernelState, error) {
	s := &State{}
	if want.Mode() != nft.ModeIPTables {
		return s, nil
	}
	s.chain, s.hash = want.Chain(), want.Hash()
	for _, table := range want.Tables {
		n := &shared{want: table, chains: map[string]*ourChain{}}
		if err := s.read(c, n); err != nil {
			return nil, fmt.Errorf("read table %s nat: %w", table.Family, err)
		}
		s.shared = append(s.shared, n)
	}
	return s, nil
}

func (s *State) read(c *nfnetlink.Conn, n *shared) (err error) {
	n.Table, err = c.Table(n.want.Family, NATTable)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	n.exists = true
	if err := s.readPostrouting(c, n); err != nil {
		return err
	}
	for _, name := range WithSubchains(s.chain) {
		if err := n.readChain(c, name); err != nil {
			return fmt.Errorf("chain %s: %w", nfnetlink.Printable(name), err)
		}
	}
	return nil
}

// readPostrouting reads the rules of POSTROUTING that lead to our chains, or have the comment of our
// jump. There can be tens of thousands of others.
func (s *State) readPostrouting(c *nfnetlink.Conn, n *shared) error {
	post, err := c.Chain(n.Family, NATTable, Postrouting)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("chain POSTROUTING: %w", err)
	}
	n.post = &post
	names := WithSubchains(s.chain)
	return c.EachRule(n.Family, NATTable, Postrouting, func(r nfnetlink.Rule) error {
		target, _ := r.Target()
		named, jumps := JumpOf(r)
		if slices.Contains(names, target) || jumps && named == s.chain {
			n.jumps = append(n.jumps, r)
		} else {
			n.others++
		}
		return nil
	})
}

// hides reports whether POSTROUTING has rules that the kernel did not list.
func (n *shared) hides() bool { return n.post != nil && len(n.jumps)+n.others < int(n.post.Use) }

// readChain reads a chain, but not many more rules than are wanted.
func (n *shared) readChain(c *nfnetlink.Conn, name string) error {
	head, err := c.Chain(n.Family, NATTable, name)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	found := &ourChain{Chain: head, targets: map[string]int{}}
	limit := len(n.want.Chain(name).Rules) + slack
	err = c.EachRule(n.Family, NATTable, name, func(r nfnetlink.Rule) error {
		found.total++
		if found.total > limit {
			return nfnetlink.ErrEnough
		}
		found.rules = append(found.rules, r)
		found.signed = found.signed || r.Signed()
		if hash := r.Hash(); hash != "" {
			found.hash = hash
		}
		if target, ok := r.Target(); ok {
			found.targets[target]++
		}
		return nil
	})
	if err != nil {
		return err
	}
	n.chains[name] = found
	return nil
}

// Installed implements [nft.KernelState].
func (s *State) Installed() (nft.Installed, bool) {
	for _, n := range s.shared {
		main := n.chains[s.chain]
		if main == nil || !main.signed {
			continue
		}
		leads := func(r nfnetlink.Rule) bool { target, _ := r.Target(); return target == s.chain }
		if slices.ContainsFunc(n.jumps, leads) {
			return nft.Installed{Layout: Layout{Name: s.chain}, Hash: main.hash}, true
		}
	}
	return nft.Installed{}, false
}
