package xtables

import (
	"fmt"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
)

// Differences implements [layout.State].
func (s *State) Differences(words facts.Words) (out []layout.Difference) {
	for _, n := range s.families {
		for _, text := range s.drift(n, words) {
			out = append(out, layout.Difference{Text: text})
		}
		out = append(out, s.prevented(n)...)
		for _, c := range s.leftovers(n) {
			d := layout.Difference{
				Kind: layout.Leftover,
				Text: fmt.Sprintf("chain %s in table %s nat", nfnetlink.Printable(c), n.Family),
			}
			for _, name := range n.unwanted(c) {
				if s.inUse(n, name) {
					d.Emptied = append(d.Emptied, n.id(name))
				}
			}
			out = append(out, d)
		}
	}
	return out
}

// prevented returns what prevents writing, and rules of other agents or versions in the
// place of ours.
func (s *State) prevented(n *shared) (out []layout.Difference) {
	where := fmt.Sprintf("table %s nat", n.Family)
	main := n.chains[s.chain]
	if main != nil && main.total > 0 && !slices.ContainsFunc(main.rules, ofAgent) {
		err := fmt.Errorf("chain %q in %s: %w", s.chain, where, nft.ErrForeignChain)
		out = append(out, layout.Difference{Kind: layout.Foreign, Text: err.Error(), Err: err})
	}
	if n.want == nil {
		return out
	}
	if n.hides() {
		err := fmt.Errorf("%s: POSTROUTING has a rule that is too large for the kernel to list (32 KiB), "+
			"which hides those after it; only flushing the chain removes it", where)
		out = append(out, layout.Difference{Kind: layout.Prevented, Text: err.Error(), Err: err})
	}
	if n.post != nil && !n.post.Hook.Equal(postroutingHook()) { // our jump would be in a chain that iptables does not use
		text := fmt.Sprintf("%s: chain POSTROUTING has %s, not %s", where, n.post.Hook, postroutingHook())
		err := fmt.Errorf("%s: %w; move its rules and run nft delete chain %s %s %s, or use mode %s",
			text, nft.ErrForeignPostrouting, n.Family, NATTable, Postrouting, nft.ModeNFTables)
		out = append(out, layout.Difference{Kind: layout.Prevented, Text: text, Err: err})
	}
	switch {
	case main == nil || main.total == 0 || main.unsigned == 0 && main.hash == s.hash:
		return out
	case main.unsigned == 0 && main.hash != "":
		text := fmt.Sprintf("%s: chain %s has the hash of another policy", where, s.chain)
		return append(out, layout.Difference{Text: text})
	}
	d := layout.Difference{
		Kind: layout.Unsigned,
		Text: fmt.Sprintf("%s: chain %s was written by another agent or version", where, s.chain),
	}
	if !n.touched(s.chain) {
		d.Rules = older.Chain{
			ChainID: n.id(s.chain), Jumps: n.jumpsTo(s.chain), Rules: main.total,
			RandomFully: slices.ContainsFunc(main.rules, facts.RandomFully),
		}
	}
	return append(out, d)
}

// jumpsTo returns the rules of POSTROUTING that lead to a chain.
func (n *shared) jumpsTo(chain string) []nfnetlink.Rule {
	return slices.DeleteFunc(slices.Clone(n.jumps), func(r nfnetlink.Rule) bool {
		to, _ := facts.Target(r)
		return to != chain
	})
}

// differs reports whether our part of a shared table has to be written again.
func (s *State) differs(n *shared) bool { return len(s.drift(n, nil)) > 0 || len(s.prevented(n)) > 0 }

// drift describes how our part of a shared table differs from the wanted one.
func (s *State) drift(n *shared, words facts.Words) (diffs []string) {
	if n.want == nil {
		return nil
	}
	where := fmt.Sprintf("table %s nat", n.Family)
	if n.Dormant() {
		diffs = append(diffs, where+" is dormant")
	}
	if n.post == nil {
		return append(diffs, where+" has no chain POSTROUTING")
	}
	exact, others := n.splitJumps(s.chain)
	if len(exact) == 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has no jump to %s", where, s.chain))
	}
	if extra := len(exact) + len(others) - 1; extra > 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has %d other jumps to %s", where, extra, s.chain))
	}
	for _, name := range WithSubchains(s.chain) {
		w := n.want.Chain(name)
		switch got := n.chains[name]; {
		case got == nil && len(w.Rules) > 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is missing", where, name))
		case got == nil:
		case got.Hook != nil:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has %s", where, name, got.Hook))
		case len(w.Rules) == 0 && got.total == 0 && s.inUse(n, name):
			// An empty chain has no effect, and the kernel does not delete it.
		case len(w.Rules) == 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is not in the config", where, name))
		case got.flooded:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has more than %d rules", where, name, len(got.rules)))
		default:
			plain := slices.Clone(got.rules)
			for i := range plain {
				plain[i].UserData = nil
			}
			diffs = append(diffs, w.Differences(where+": chain "+name, *n.want, nil, plain, words)...)
		}
	}
	return diffs
}

// splitJumps returns the rules of POSTROUTING that lead to the wanted chain: those that are
// exactly ours, and others: variants of other agents, and ours if another program has renamed
// the chain.
func (n *shared) splitJumps(chain string) (exact, others []nfnetlink.Rule) {
	jump := n.want.Chain(Postrouting).Bytecode(*n.want, nil)[0]
	for _, r := range n.jumps {
		to, _ := facts.Target(r)
		named, _ := JumpOf(r)
		switch {
		case sameText(r, jump):
			exact = append(exact, r)
		case to == chain || named == chain:
			others = append(others, r)
		}
	}
	return exact, others
}

// wants reports whether a chain is wanted.
func (n *shared) wants(chain string) bool { return n.want != nil && len(n.want.Chain(chain).Rules) > 0 }

// unwanted returns what is not wanted of a chain of ours and its further ones.
func (n *shared) unwanted(c string) []string {
	return slices.DeleteFunc(WithSubchains(c), func(name string) bool { return n.chains[name] == nil || n.wants(name) })
}

// inUse reports whether something refers to a chain of ours but the rules that go or are written again
// together with it. The kernel does not delete such a chain.
func (s *State) inUse(n *shared, name string) bool {
	ch := n.chains[name]
	if ch == nil {
		return false
	}
	known := ch.total + len(n.jumpsTo(name))
	for _, c := range append(s.leftovers(n), s.chain) {
		for _, part := range WithSubchains(c) {
			if other := n.chains[part]; other != nil {
				known += other.targets[name]
			}
		}
	}
	return int(ch.Use) > known
}
