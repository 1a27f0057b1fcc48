package xtables

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A State is our chains in the shared tables of iptables-nft, as the kernel has them, and
// the wanted ones. It implements [layout.State].
type State struct {
	none     bool      // no rules are wanted, of any mode
	chain    string    // the wanted one, "" for none
	hash     string    // of the wanted policy
	families []*shared // IPv4 and IPv6
}

// A shared is a shared table as the kernel has it: what of it is ours, or leads to it.
type shared struct {
	nfnetlink.Table
	want   *nft.Table // what of it is to be ours, nil for nothing
	exists bool
	post   *nfnetlink.Chain // POSTROUTING, nil if there is none
	jumps  []nfnetlink.Rule // of POSTROUTING, to chains that are or may be ours
	rest   int              // the number of its other rules
	owns   []string         // chains that are or may be ours: to which our jump leads, or without one
	chains map[string]*ourChain
}

// An ourChain is a chain of a shared table that is or may be ours.
type ourChain struct {
	nfnetlink.Chain
	rules    []nfnetlink.Rule // the first ones
	total    int              // the number of rules
	unsigned int              // those that we did not write
	targets  map[string]int   // the number of rules that lead to each chain
	hash     string           // of the policy, from the rule that has it
	flooded  bool             // it has more rules, which were not read
}

func (n *shared) id(chain string) nfnetlink.ChainID {
	return nfnetlink.ChainID{Family: n.Family, Table: NATTable, Name: chain}
}

// slack is the number of unexpected rules that are read and listed. Their number
// alone is reported beyond that, because other programs can add more than fits
// our memory.
const slack = 5_000

// Read reads our chains: the wanted one, and with [layout.Everything] those of any name. With a
// state of an earlier attempt to write, rules are read only of chains that have others since.
func Read(c *nfnetlink.Conn, want, _ nft.Ruleset, depth layout.Depth, staged layout.State) (layout.State, error) {
	s := &State{none: want.Layout == nil}
	earlier, _ := staged.(*State)
	if want.Mode() == nft.ModeIPTables {
		s.chain, s.hash = want.Chain(), want.Hash()
	}
	for i, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		n, was := &shared{chains: map[string]*ourChain{}}, &shared{}
		if earlier != nil {
			was = earlier.families[i]
		}
		for i := range want.Tables {
			if s.chain != "" && want.Tables[i].Family == f {
				n.want = &want.Tables[i]
			}
		}
		if err := s.read(c, n, was, f, depth); err != nil {
			return nil, err
		}
		s.families = append(s.families, n)
	}
	return s, nil
}

func (s *State) read(c *nfnetlink.Conn, n, was *shared, f nfnetlink.Family, depth layout.Depth) (err error) {
	n.Table, err = c.Table(f, NATTable)
	if nfnetlink.IsNotExist(err) {
		n.Table.Family = f
		return nil
	}
	if err != nil {
		return fmt.Errorf("read table %s nat: %w", f, err)
	}
	n.exists = true
	var names []string
	if s.chain != "" {
		names = WithSubchains(s.chain)
	}
	if err := n.readPostrouting(c, names); err != nil {
		return err
	}
	if depth > layout.Ours {
		if s.none {
			if err := n.findLost(c, was); err != nil {
				return err
			}
		}
		for _, own := range n.owns {
			names = append(names, WithSubchains(own)...)
		}
	}
	for _, name := range names {
		if n.chains[name] != nil {
			continue
		}
		if err := s.readChain(c, n, was, name); err != nil {
			return err
		}
	}
	return nil
}

// readPostrouting reads the rules of POSTROUTING that lead to chains of these names, or
// have the comment of our jump. There can be tens of thousands of others.
func (n *shared) readPostrouting(c *nfnetlink.Conn, names []string) error {
	post, err := c.Chain(n.Family, NATTable, Postrouting)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil
		}
		return fmt.Errorf("read chain POSTROUTING: %w", err)
	}
	n.post = &post
	return c.EachRule(n.Family, NATTable, Postrouting, func(r nfnetlink.Rule) error {
		to, _ := facts.Target(r)
		_, ours := JumpOf(r)
		if !ours && !slices.Contains(names, to) {
			n.rest++
			return nil
		}
		n.jumps = append(n.jumps, r)
		if ours && !slices.Contains(n.owns, to) {
			n.owns = append(n.owns, to)
		}
		return nil
	})
}

// hides reports whether POSTROUTING has rules that the kernel did not list.
func (n *shared) hides() bool { return n.post != nil && len(n.jumps)+n.rest < int(n.post.Use) }

// findLost finds the chains with rules of ours that no jump names or reaches, such as those of an
// agent that was killed before it wrote the jump. It reads all rules of the table, which is for
// cleanup alone: kube-proxy has tens of thousands there.
func (n *shared) findLost(c *nfnetlink.Conn, was *shared) error {
	if was.exists {
		n.owns = append(n.owns, was.owns...)
		return nil
	}
	var found []string
	err := c.EachRule(n.Family, NATTable, "", func(r nfnetlink.Rule) error {
		if facts.Signed(r) && !slices.Contains(found, r.Chain) {
			found = append(found, r.Chain)
		}
		return nil
	})
	for _, name := range found {
		part := func(own string) bool { return own != name && slices.Contains(WithSubchains(own), name) }
		if !slices.Contains(n.owns, name) && !slices.ContainsFunc(slices.Concat(n.owns, found), part) {
			n.owns = append(n.owns, name)
		}
	}
	if errors.Is(err, nfnetlink.ErrInterrupted) { // it may lack a rule, but hardly all of a chain
		return nil
	}
	return err
}

// readChain reads a chain. Of a wanted one, or one to which other programs have added rules,
// it does not read many more rules than that.
func (s *State) readChain(c *nfnetlink.Conn, n, was *shared, name string) error {
	head, err := c.Chain(n.Family, NATTable, name)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil
		}
		return fmt.Errorf("read chain %s: %w", nfnetlink.Printable(name), err)
	}
	most, wanted := slack, n.want != nil && slices.Contains(WithSubchains(s.chain), name)
	if wanted {
		most += len(n.want.Chain(name).Rules)
	}
	ch := &ourChain{Chain: head, targets: map[string]int{}}
	add := func(r nfnetlink.Rule) error {
		ch.total++
		switch {
		case !facts.Signed(r):
			ch.unsigned++
		case facts.UserData(r.UserData, hashType) != "":
			ch.hash = facts.UserData(r.UserData, hashType)
		}
		if to, ok := facts.Target(r); ok {
			ch.targets[to]++
		}
		if len(ch.rules) < most {
			ch.rules = append(ch.rules, r)
		} else if ch.flooded = wanted || ch.unsigned > slack; ch.flooded {
			return nfnetlink.ErrEnough
		}
		return nil
	}
	if earlier := was.chains[name]; earlier != nil && earlier.Use == head.Use {
		*ch = *earlier
	} else if err := c.EachRule(n.Family, NATTable, name, add); err != nil {
		return err
	}
	n.chains[name] = ch
	return nil
}

// owned reports whether we wrote all of a chain and of its further ones.
func (n *shared) owned(c string) bool {
	rules := 0
	for _, name := range WithSubchains(c) {
		if ch := n.chains[name]; ch != nil {
			if ch.unsigned > 0 {
				return false
			}
			rules += ch.total
		}
	}
	return rules > 0
}

// touched reports whether we wrote some of a chain: another program may have restored,
// or changed, the others.
func (n *shared) touched(c string) bool {
	return slices.ContainsFunc(WithSubchains(c), func(name string) bool {
		ch := n.chains[name]
		return ch != nil && ch.total > ch.unsigned
	})
}

// ofAgent reports whether the comment of a rule is that of a masquerade agent, in
// any version: "subject to MASQUERADE".
func ofAgent(r nfnetlink.Rule) bool {
	return strings.Contains(facts.Comment(r), "subject to MASQUERADE")
}

// leftovers returns the chains that are ours and not wanted.
func (s *State) leftovers(n *shared) (left []string) {
	for _, c := range n.owns {
		if !(c == s.chain && n.want != nil) && n.owned(c) && !slices.Contains(left, c) {
			left = append(left, c)
		}
	}
	if n.want == nil && s.chain != "" && n.touched(s.chain) && !slices.Contains(left, s.chain) {
		left = append(left, s.chain)
	}
	return left
}

// Installed implements [layout.State].
func (s *State) Installed() (layout.Installed, bool) {
	for _, n := range s.families {
		for _, c := range n.owns {
			if ch := n.chains[c]; ch != nil && n.touched(c) && len(n.jumpsTo(c)) > 0 {
				return layout.Installed{Layout: Layout{Name: c}, Hash: ch.hash}, true
			}
		}
	}
	return layout.Installed{}, false
}
