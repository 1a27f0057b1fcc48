package xtables

import (
	"bytes"
	"cmp"
	"context"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// Stage implements [layout.State]: it wakes dormant tables. The kernel does not wake a table
// and create a base chain in it in one transaction.
func (s *State) Stage(_ context.Context, commit layout.Commit) error {
	b := &nfnetlink.Batch{}
	for _, n := range s.families {
		if n.want != nil && n.Dormant() {
			b.WakeTable(n.Table)
		}
	}
	return commit(b)
}

// Switch implements [layout.State].
func (s *State) Switch(now, _ *nfnetlink.Batch) {
	for _, n := range s.families {
		if n.want != nil {
			s.write(now, n)
		}
		if left := s.leftovers(n); len(left) > 0 {
			s.remove(now, n, left)
		}
	}
}

// write plans the changes of our part of a shared table: correct rules keep their place
// and counters, and those of other programs are not touched.
func (s *State) write(b *nfnetlink.Batch, n *shared) {
	if !n.exists {
		b.AddTable(n.want.Family, NATTable)
	}
	// Renamed chains still refer to the additional chains.
	for _, c := range s.leftovers(n) {
		if c.Text == s.chain {
			b.FlushChain(n.want.Family, NATTable, c.Name)
		}
	}
	// Chains before the rules that refer to them, in the order of WithSubchains,
	// and ours before POSTROUTING, as iptables creates them.
	names := WithSubchains(s.chain)
	for _, name := range names {
		got := n.chains[name]
		if got != nil && got.Hook != nil { // nothing can jump to a base chain
			b.FlushChain(n.Family, NATTable, name)
			b.DelChain(n.Family, NATTable, name)
		}
		if len(n.want.Chain(name).Rules) > 0 && (got == nil || got.Hook != nil) {
			b.AddChain(nfnetlink.Chain{Family: n.want.Family, Table: NATTable, Name: name})
		}
	}
	if n.post == nil {
		b.AddChain(n.want.Chain(Postrouting).KernelChain(*n.want))
	}
	for _, name := range slices.Backward(names) {
		rules, got := s.bytecode(*n.want, name), n.chains[name]
		switch {
		case got == nil || got.Hook != nil:
			edit(b, rules, nil)
		case got.flooded || got.hides(rules):
			b.FlushChain(n.Family, NATTable, name)
			edit(b, rules, nil)
		default:
			edit(b, rules, got.rules)
		}
	}
	for _, name := range slices.Backward(names) {
		if got := n.chains[name]; got != nil && got.Hook == nil && len(n.want.Chain(name).Rules) == 0 && !n.inUse(name) {
			b.DelChain(n.Family, NATTable, name)
		}
	}
	s.writeJump(b, n)
}

// hides reports whether rules were not listed, because one before them is too large for
// the kernel to list: the last wanted one is missing, and the chain has more uses than its
// rules and a jump.
func (c *chain) hides(want []nfnetlink.Rule) bool {
	return len(want) > 0 && int(c.Use) > c.total+1 &&
		!slices.ContainsFunc(c.rules, func(r nfnetlink.Rule) bool { return sameText(r, want[len(want)-1]) })
}

// writeJump leaves one jump to our chain in POSTROUTING.
func (s *State) writeJump(b *nfnetlink.Batch, n *shared) {
	jump := n.want.Chain(Postrouting).Bytecode(*n.want, nil)[0]
	exact, others := n.splitJumps(s.chain)
	// The one with the lowest handle is the oldest, regardless of the position.
	slices.SortStableFunc(exact, func(a, b nfnetlink.Rule) int { return cmp.Compare(a.Handle, b.Handle) })
	// The jump to our renamed chain, before which ours belongs.
	renamed := slices.IndexFunc(n.jumps, func(r nfnetlink.Rule) bool {
		c, ours := jumpOf(r)
		return ours && c.Text == s.chain && n.owned(c)
	})
	switch {
	case len(exact) > 0:
		others = append(others, exact[1:]...)
	case len(others) > 0:
		jump.Handle = others[0].Handle
		b.ReplaceRule(jump)
		others = others[1:]
	case renamed >= 0:
		b.InsertRule(jump, n.jumps[renamed].Handle)
	default:
		b.AddRule(jump)
	}
	for _, r := range others {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
}

// edit edits the rules of a chain into the wanted ones. Correct rules at the beginning and
// the end stay, and get our signature if they do not have it; of the others, a rule that is
// needed again keeps its counter.
func edit(b *nfnetlink.Batch, want, got []nfnetlink.Rule) {
	head, tail := nft.SameEnds(want, got, sameText)
	middle := got[head : len(got)-tail]
	counted := make(map[string][][]nfnetlink.Expr, len(middle))
	for _, r := range middle {
		key := nfnetlink.Key(r.Exprs)
		counted[key] = append(counted[key], r.Exprs)
	}
	for _, w := range want[head : len(want)-tail] {
		key := nfnetlink.Key(w.Exprs)
		if same := counted[key]; len(same) > 0 {
			w.Exprs, counted[key] = same[0], same[1:]
		}
		if tail > 0 {
			b.InsertRule(w, got[len(got)-tail].Handle)
		} else {
			b.AddRule(w)
		}
	}
	for _, r := range middle {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
	sign(b, want[:head], got[:head])
	sign(b, want[len(want)-tail:], got[len(got)-tail:])
}

// sign replaces rules whose user data are not the wanted ones. They keep their counters.
func sign(b *nfnetlink.Batch, want, got []nfnetlink.Rule) {
	for i, r := range got {
		if !bytes.Equal(r.UserData, want[i].UserData) {
			r.UserData = want[i].UserData
			b.ReplaceRule(r)
		}
	}
}

// unwanted returns the chains that are to be deleted together with a chain of ours.
func (s *State) unwanted(n *shared, c ownChain) []string {
	return slices.DeleteFunc(c.members(), func(name string) bool {
		return n.chains[name] == nil || n.want != nil && slices.Contains(WithSubchains(s.chain), name)
	})
}

// remove plans the removal of chains of ours with their jumps. If they are our last ones,
// the rest of the table is deleted, too, if only we can have created it: an empty
// POSTROUTING and nothing else. Chains that other programs' rules or maps refer to stay,
// empty, because the kernel does not delete them.
func (s *State) remove(b *nfnetlink.Batch, n *shared, left []ownChain) {
	var names []string
	for _, c := range left {
		names = append(names, s.unwanted(n, c)...)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	for _, r := range n.jumps {
		if to, _ := rule.Target(r); slices.Contains(names, to) {
			b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
		}
	}
	// First the rules, which refer to chains, then the chains.
	for _, name := range names {
		b.FlushChain(n.Family, NATTable, name)
	}
	for _, name := range names {
		if !n.inUse(name) {
			b.DelChain(n.Family, NATTable, name)
		}
	}
	// Without another chain, set or map, only rules of POSTROUTING can refer to our chains.
	if n.want == nil && n.rest == 0 && int(n.Use) == len(names)+1 && n.post != nil {
		b.DelTable(n.Family, NATTable)
	}
}
