package xtables

import (
	"context"
	"errors"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Stage implements [nft.KernelState]: it wakes dormant tables. The kernel does not wake a table and
// create a base chain in it in one transaction.
func (s *State) Stage(ctx context.Context, commit nft.Commit) error {
	wake := &nfnetlink.Batch{}
	for _, n := range s.shared {
		if n.Dormant() {
			wake.WakeTable(n.Table)
		}
	}
	return errors.Join(ctx.Err(), commit(wake))
}

// Switch implements [nft.KernelState]. If anything differs, our chains are written again as a whole, in both
// families: another agent may have written the one that was right. That is right at any generation: chains
// are named, and the jumps that are deleted by their handles have to be as they were found.
func (s *State) Switch(now, _ *nfnetlink.Batch) (atAny bool) {
	if len(s.Differences()) > 0 {
		for _, n := range s.shared {
			s.write(now, n)
			s.writeJump(now, n)
		}
	}
	return true
}

// write writes our chains in a shared table again. What other programs have there is not touched.
func (s *State) write(b *nfnetlink.Batch, n *shared) {
	if !n.exists {
		b.AddTable(n.want.Family, NATTable)
	}
	names := WithSubchains(s.chain)
	for _, name := range names {
		if n.chains[name] != nil {
			b.FlushChain(n.id(name))
		}
	}
	// Chains before the rules that refer to them, in the order of WithSubchains.
	for _, name := range names {
		found := n.chains[name]
		wanted := len(n.want.Chain(name).Rules) > 0
		// Nothing can jump to a base chain. An empty chain to which others refer stays.
		if found != nil && (found.Hook != nil || !wanted && !n.inUse(found)) {
			b.DelChain(n.id(name))
		}
		if !wanted {
			continue
		}
		b.AddChain(nfnetlink.Chain{Family: n.want.Family, Table: NATTable, Name: name})
		if found == nil { // another agent may have created it since
			b.FlushChain(n.id(name))
		}
	}
	for _, name := range names {
		for _, r := range s.bytecode(n.want, name) {
			b.AddRule(r)
		}
	}
}

// writeJump leaves one jump to our chain in POSTROUTING.
func (s *State) writeJump(b *nfnetlink.Batch, n *shared) {
	if n.post == nil {
		b.AddChain(n.want.Chain(Postrouting).KernelChain(n.want))
	}
	exact, others := s.splitJumps(n)
	if len(exact) == 0 {
		b.AddRule(n.want.Chain(Postrouting).Bytecode(n.want, nil)[0])
	} else {
		others = append(others, exact[1:]...)
	}
	for _, r := range others {
		b.Require(foundRule{n.Table, r})
		b.DelRule(r)
	}
}

// A foundRule is a rule that is to be deleted as it was found.
type foundRule struct {
	table nfnetlink.Table
	rule  nfnetlink.Rule
}

// Check implements [nfnetlink.Condition].
func (f foundRule) Check(c *nfnetlink.Conn) error {
	if err := c.SameTable(f.table); err != nil {
		return err
	}
	current, err := c.Rule(f.rule.Family, f.rule.Table, f.rule.Chain, f.rule.Handle)
	if err == nil && !sameText(current, f.rule) {
		return nfnetlink.ErrInterrupted
	}
	return err
}
