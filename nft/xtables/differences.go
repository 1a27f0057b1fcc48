package xtables

import (
	"fmt"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Differences implements [nft.KernelState].
func (s *State) Differences() (out []nft.Difference) {
	for _, n := range s.shared {
		out = append(out, n.prevented()...)
		for _, text := range s.drift(n) {
			out = append(out, nft.Difference{Text: text})
		}
		main := n.chains[s.chain]
		switch {
		case main == nil || main.total == 0:
		case !main.signed:
			out = append(out, nft.Difference{
				Kind: nft.Replaced,
				Text: fmt.Sprintf("table %s nat: chain %s has %d rules, none of which this agent wrote", n.want.Family, s.chain,
					main.total),
			})
		case main.hash != s.hash:
			text := fmt.Sprintf("table %s nat: chain %s does not have the hash of the policy", n.want.Family, s.chain)
			out = append(out, nft.Difference{Text: text})
		}
	}
	return out
}

// prevented returns what prevents writing.
func (n *shared) prevented() []nft.Difference {
	where := fmt.Sprintf("table %s nat", n.want.Family)
	if n.hides() {
		err := fmt.Errorf("%s: POSTROUTING has a rule that is too large for the kernel to list (32 KiB), "+
			"which hides those after it; only flushing the chain removes it", where)
		return []nft.Difference{{Kind: nft.Prevented, Text: err.Error(), Err: err}}
	}
	if n.post != nil && !n.post.Hook.Equal(postroutingHook()) { // our jump would be in a chain that iptables does not use
		text := fmt.Sprintf("%s: chain POSTROUTING has %s, not %s", where, n.post.Hook, postroutingHook())
		err := fmt.Errorf("%s: %w; move its rules and run nft delete chain %s %s %s, or use mode %s",
			text, nft.ErrForeignPostrouting, n.Family, NATTable, Postrouting, nft.ModeNFTables)
		return []nft.Difference{{Kind: nft.Prevented, Text: text, Err: err}}
	}
	return nil
}

// drift describes how our part of a shared table differs from the wanted one.
func (s *State) drift(n *shared) (diffs []string) {
	where := fmt.Sprintf("table %s nat", n.want.Family)
	if n.Dormant() {
		diffs = append(diffs, where+" is dormant")
	}
	if n.post == nil {
		return append(diffs, where+" has no chain POSTROUTING")
	}
	exact, others := s.splitJumps(n)
	if len(exact) == 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has no jump to %s", where, s.chain))
	}
	if extra := len(exact) + len(others) - 1; extra > 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has %d other jumps to %s", where, extra, s.chain))
	}
	for _, name := range WithSubchains(s.chain) {
		w := n.want.Chain(name)
		found := n.chains[name]
		switch {
		case found == nil && len(w.Rules) > 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is missing", where, name))
		case found == nil:
		case found.Hook != nil:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has %s", where, name, found.Hook))
		case len(w.Rules) == 0 && found.total == 0 && n.inUse(found):
			// An empty chain has no effect, and the kernel does not delete it.
		case len(w.Rules) == 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is not in the config", where, name))
		case found.total > len(found.rules):
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has more than %d rules", where, name, len(found.rules)))
		default:
			plain := slices.Clone(found.rules)
			for i := range plain {
				plain[i].UserData = nil
			}
			diffs = append(diffs, w.Differences(where+": chain "+name, n.want, nil, plain)...)
		}
	}
	return diffs
}

// splitJumps returns the rules of POSTROUTING that lead to the wanted chain: those that are
// exactly ours, and others: variants of other agents, and ours if another program has renamed
// the chain.
func (s *State) splitJumps(n *shared) (exact, others []nfnetlink.Rule) {
	jump := n.want.Chain(Postrouting).Bytecode(n.want, nil)[0]
	for _, r := range n.jumps {
		target, _ := r.Target()
		named, _ := JumpOf(r)
		switch {
		case sameText(r, jump):
			exact = append(exact, r)
		case target == s.chain || named == s.chain:
			others = append(others, r)
		}
	}
	return exact, others
}

// inUse reports whether something refers to a chain but the rules of our chains, which are written again
// together. The kernel does not delete such a chain.
func (n *shared) inUse(found *ourChain) bool {
	known := found.total
	for _, other := range n.chains {
		known += other.targets[found.Name]
	}
	return int(found.Use) > known
}
