package xtables

import (
	"context"
	"errors"
	"slices"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// Stage implements [layout.State]: it wakes dormant tables. The kernel does not wake a table and
// create a base chain in it in one transaction.
func (s *State) Stage(ctx context.Context, commit layout.Commit) error {
	wake := &nfnetlink.Batch{}
	for _, n := range s.families {
		if n.want != nil && n.Dormant() {
			wake.WakeTable(n.Table)
		}
	}
	return errors.Join(ctx.Err(), commit(wake))
}

// Switch implements [layout.State]. What is added is right at any generation, and so are our
// chains, which are written again as a whole, in both families: another agent may have written the one that
// was right. What is deleted by its handle was planned for one generation.
func (s *State) Switch(now, _ *nfnetlink.Batch) (atAny bool) {
	atAny = true
	differ := slices.ContainsFunc(s.families, func(n *shared) bool { return n.want != nil && s.differs(n) })
	for _, n := range s.families {
		left := s.leftovers(n)
		atAny = atAny && len(left) == 0
		if n.want != nil && differ {
			s.write(now, n)
			atAny = s.writeJump(now, n) && atAny
			left = append(left, s.chain)
		}
		atAny = s.remove(now, n, left) && atAny
	}
	return atAny
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
		if !n.wants(name) {
			continue
		}
		got := n.chains[name]
		if got != nil && got.Hook != nil { // nothing can jump to a base chain
			b.DelChain(n.id(name))
		}
		b.AddChain(nfnetlink.Chain{Family: n.want.Family, Table: NATTable, Name: name})
		if got == nil { // another agent may have created it since
			b.FlushChain(n.id(name))
		}
	}
	for _, name := range names {
		for _, r := range s.bytecode(*n.want, name) {
			b.AddRule(r)
		}
	}
}

// writeJump leaves one jump to our chain in POSTROUTING, and reports whether it deleted no other.
func (s *State) writeJump(b *nfnetlink.Batch, n *shared) (atAny bool) {
	if n.post == nil {
		b.AddChain(n.want.Chain(Postrouting).KernelChain(*n.want))
	}
	exact, others := n.splitJumps(s.chain)
	if len(exact) == 0 {
		b.AddRule(n.want.Chain(Postrouting).Bytecode(*n.want, nil)[0])
	} else {
		others = append(others, exact[1:]...)
	}
	for _, r := range others {
		b.DelRule(r)
	}
	return len(others) == 0
}

// remove plans the removal of what is not wanted of chains of ours, with the jumps to it, and reports
// whether there are no such jumps. If they are our last ones, the rest of the table is deleted, too, if
// only we can have created it: an empty POSTROUTING and nothing else. Chains that other programs' rules
// or maps refer to stay, empty, because the kernel does not delete them.
func (s *State) remove(b *nfnetlink.Batch, n *shared, left []string) (atAny bool) {
	if len(left) == 0 {
		return true
	}
	var names []string
	for _, c := range left {
		names = append(names, n.unwanted(c)...)
	}
	slices.Sort(names)
	names, atAny = slices.Compact(names), true
	for _, r := range n.jumps {
		if to, _ := facts.Target(r); slices.Contains(names, to) {
			b.DelRule(r)
			atAny = false
		}
	}
	// First the rules, which refer to chains, then the chains.
	for _, name := range names {
		b.FlushChain(n.id(name))
	}
	for _, name := range names {
		if !s.inUse(n, name) {
			b.DelChain(n.id(name))
		}
	}
	// Without another chain, set or map, only rules of POSTROUTING can refer to our chains.
	if n.want == nil && n.rest == 0 && int(n.Use) == len(names)+1 && n.post != nil {
		b.DelTable(n.Family, NATTable)
	}
	return atAny
}
