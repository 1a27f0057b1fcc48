package xtables

import (
	"cmp"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// ensure plans the changes of our part of the shared table: correct rules keep
// their place and counters, and those of other programs are not touched.
func (n *Shared) ensure(b *nfnetlink.Batch, want nft.Table, chain string) {
	switch {
	case !n.present:
		b.AddTable(want.Family, NATTable)
	case n.table.Dormant():
		b.WakeTable(n.table)
	}
	// Renamed chains still refer to the additional chains.
	for _, c := range n.renamed(chain) {
		b.FlushChain(want.Family, NATTable, c.Name)
	}
	// Chains before the rules that refer to them, in the order of WithSubchains,
	// and ours before POSTROUTING, as iptables creates them.
	for _, name := range WithSubchains(chain) {
		n.unhook(b, name)
		if _, present := n.chains[name]; !present && len(want.Chain(name).Rules) > 0 {
			b.AddChain(nfnetlink.Chain{Family: want.Family, Table: NATTable, Name: name})
		}
	}
	if n.post == nil {
		b.AddChain(want.Chain(Postrouting).KernelChain(want))
	}
	for _, name := range slices.Backward(WithSubchains(chain)) {
		rules, got := want.Chain(name).Bytecode(want, nil), n.chains[name]
		switch {
		case n.trusted[name]:
			continue
		case n.flooded[name], n.hides(name, rules):
			b.FlushChain(want.Family, NATTable, name)
			got = nil
		}
		editRules(b, rules, got)
	}
	for _, name := range slices.Backward(WithSubchains(chain)) {
		if _, present := n.chains[name]; present && len(want.Chain(name).Rules) == 0 && !n.heldByOthers(name) {
			b.DelChain(want.Family, NATTable, name)
		}
	}
	n.ensureJump(b, want.Chain(Postrouting).Bytecode(want, nil)[0], chain)
}

// unhook deletes a base chain with the name of one of ours, to which nothing can jump.
func (n *Shared) unhook(b *nfnetlink.Batch, name string) {
	if n.heads[name].Hook == nil {
		return
	}
	b.FlushChain(n.Family, NATTable, name)
	b.DelChain(n.Family, NATTable, name)
	delete(n.chains, name)
	delete(n.heads, name)
}

// heldByOthers reports whether other programs' rules or maps refer to an
// additional chain of ours. The kernel does not delete such a chain.
func (n *Shared) heldByOthers(name string) bool { return n.heldExcept(name, 0) }

// heldExcept is like heldByOthers for a chain to which that many jumps in
// POSTROUTING will be deleted.
func (n *Shared) heldExcept(name string, jumps int) bool {
	head, read := n.heads[name]
	switch {
	case !read || n.trusted[name]:
		return false
	case n.flooded[name]: // how many of its references are its own rules is unknown
		return true
	}
	ours := len(n.chains[name]) + jumps
	for _, rules := range n.chains {
		for _, r := range rules {
			if to, _ := rule.Target(r); to == name {
				ours++
			}
		}
	}
	return int(head.Use) > ours
}

func (n *Shared) ensureJump(b *nfnetlink.Batch, jump nfnetlink.Rule, chain string) {
	exact, others := n.jumps(chain, jump)
	// The one with the lowest handle is the oldest, regardless of the position.
	slices.SortFunc(exact, func(a, b nfnetlink.Rule) int { return cmp.Compare(a.Handle, b.Handle) })
	switch {
	case len(exact) > 0:
		others = append(others, exact[1:]...)
	case len(others) > 0:
		jump.Handle = others[0].Handle
		b.ReplaceRule(jump)
		others = others[1:]
	default:
		n.addJump(b, jump, chain)
	}
	for _, r := range others {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
}

// addJump adds the jump, before the jump to our renamed chain if there is one.
func (n *Shared) addJump(b *nfnetlink.Batch, jump nfnetlink.Rule, chain string) {
	renamed := n.renamed(chain)
	i := slices.IndexFunc(n.rules, func(r nfnetlink.Rule) bool {
		c, ok := jumpOf(r)
		return ok && slices.Contains(renamed, c)
	})
	if i < 0 {
		b.AddRule(jump)
		return
	}
	b.InsertRule(jump, n.rules[i].Handle)
}

// editRules edits the rules of a chain into the wanted ones. Correct rules at the
// beginning and the end stay; of the others, a rule that is needed again keeps
// its counter.
func editRules(b *nfnetlink.Batch, want, got []nfnetlink.Rule) {
	head, tail := nft.SameEnds(want, got, sameXT)
	middle := got[head : len(got)-tail]
	counted := make(map[string][][]nfnetlink.Expr, len(middle))
	for _, r := range middle {
		key := nfnetlink.Key(r.Exprs)
		counted[key] = append(counted[key], r.Exprs)
	}
	for _, w := range want[head : len(want)-tail] {
		w.UserData = signature
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
	if head+tail == len(want) && head+tail > 0 && !slices.ContainsFunc(got, signed) {
		last := got[len(got)-1]
		if tail == 0 {
			last = got[head-1]
		}
		last.UserData = signature
		b.ReplaceRule(last)
	}
}

// Remove plans the removal of chains of ours with their jumps, except the chains
// to keep. If they are our last ones, the rest of the table is deleted, too, if
// only we can have created it: an empty POSTROUTING and nothing else. Chains that
// other programs' rules or maps refer to stay, empty, because the kernel does not
// delete them; Remove returns their names.
func (n *Shared) Remove(b *nfnetlink.Batch, chains []OwnChain, kept []string, last bool) (held []string) {
	rest := len(n.rules) + n.unread
	jumps := map[string]int{}
	for _, c := range chains {
		for _, r := range n.rules {
			if to, ok := rule.Target(r); ok && to == c.Name && !slices.Contains(kept, to) {
				b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
				jumps[to]++
				rest--
			}
		}
	}
	// First the rules, which refer to chains, then the chains.
	names := n.toDelete(chains, kept)
	for _, name := range names {
		b.FlushChain(n.Family, NATTable, name)
	}
	for _, name := range names {
		if n.heldExcept(name, jumps[name]) {
			held = append(held, name)
		} else {
			b.DelChain(n.Family, NATTable, name)
		}
	}
	if last && rest == 0 && n.all-len(names) == 1 && n.post != nil && len(held) == 0 {
		b.DelTable(n.Family, NATTable)
	}
	return held
}

// toDelete returns the chains that are deleted together with chains of ours.
func (n *Shared) toDelete(chains []OwnChain, kept []string) []string {
	var names []string
	for _, c := range chains {
		for _, name := range c.Members() {
			if _, present := n.chains[name]; present && !slices.Contains(kept, name) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}
