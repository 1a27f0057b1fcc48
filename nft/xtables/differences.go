package xtables

import (
	"fmt"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Differences implements [nft.KernelState].
func (s *State) Differences() (diffs []nft.Difference) {
	for _, t := range s.tables {
		diffs = append(diffs, t.prevented()...)
		for _, text := range s.drift(t) {
			diffs = append(diffs, nft.Difference{Text: text})
		}
		switch {
		case t.chain == nil || t.chain.total == 0:
		case !t.chain.signed:
			text := fmt.Sprintf("%s: chain %s has %d rules, none of which this agent wrote", t, s.name, t.chain.total)
			diffs = append(diffs, nft.Difference{Kind: nft.Overwritten, Text: text})
		case t.chain.hash != s.hash:
			text := fmt.Sprintf("%s: chain %s does not have the hash of the policy", t, s.name)
			diffs = append(diffs, nft.Difference{Text: text})
		}
	}
	return diffs
}

// String returns the name of the table, as differences begin with it.
func (t *table) String() string { return fmt.Sprintf("table %s nat", t.want.Family) }

// prevented returns what prevents writing.
func (t *table) prevented() []nft.Difference {
	if t.hasUnlistedRules() {
		err := fmt.Errorf("%s: POSTROUTING has a rule that is too large for the kernel to list (32 KiB), "+
			"which hides those after it; only flushing the chain removes it", t)
		return []nft.Difference{{Kind: nft.Prevented, Text: err.Error(), Err: err}}
	}
	if t.post != nil && !t.post.Hook.Equal(postroutingHook()) { // our jump would be in a chain that iptables does not use
		text := fmt.Sprintf("%s: chain POSTROUTING has another hook or priority than that of iptables", t)
		err := fmt.Errorf("%s: %w; move its rules and run nft delete chain %s %s %s, or use mode %s",
			text, nft.ErrPostroutingHook, t.Family, NATTable, Postrouting, nft.ModeNFTables)
		return []nft.Difference{{Kind: nft.Prevented, Text: text, Err: err}}
	}
	return nil
}

// drift describes how our part of a shared table differs from the wanted one.
func (s *State) drift(t *table) (diffs []string) {
	if t.Dormant() {
		diffs = append(diffs, fmt.Sprintf("%s is dormant", t))
	}
	if t.post == nil {
		return append(diffs, fmt.Sprintf("%s has no chain POSTROUTING", t))
	}
	exact, variants := t.splitJumps()
	if len(exact) == 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has no jump to %s", t, s.name))
	}
	if extra := len(exact) + len(variants) - 1; extra > 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has %d other jumps to %s", t, extra, s.name))
	}
	where := fmt.Sprintf("%s: chain %s", t, s.name)
	switch {
	case t.chain == nil:
		return append(diffs, where+" is missing")
	case t.chain.Hook != nil:
		return append(diffs, where+" is a base chain")
	}
	if text := t.want.Chain(s.name).Difference(where, s.bytecode(t.want), t.chain.rules, sameExprs); text != "" {
		diffs = append(diffs, text)
	}
	return diffs
}

// sameExprs compares rules of the shared tables without user data, in which programs keep their own notes.
func sameExprs(a, b nfnetlink.Rule) bool { return nfnetlink.Same(a.Exprs, b.Exprs) }
