package xtables

import (
	"fmt"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// sameXT compares rules of the shared tables without user data, in which programs
// keep their own notes.
func sameXT(a, b nfnetlink.Rule) bool { return nfnetlink.EqualExprs(a.Exprs, b.Exprs) }

// jumpsTo reports whether the chain has rules and exactly our jump to it exists.
func (n *Shared) jumpsTo(chain string) bool {
	return len(n.chains[chain]) > 0 && slices.Contains(n.named, OwnChain{chain, chain})
}

// Foreign reports whether the chain belongs to another program: it has rules, but
// none of a masquerade agent. The comments of all agents, in any version, mention
// what is subject to MASQUERADE.
func (n *Shared) Foreign(chain string) bool {
	return len(n.chains[chain]) > 0 && !slices.ContainsFunc(n.chains[chain], ofAgent)
}

// Differences describes how our part of the shared table differs from the wanted
// one.
func (n *Shared) Differences(want nft.Table, chain string) []string {
	where := fmt.Sprintf("table %s nat", want.Family)
	var diffs []string
	if n.table.Dormant() {
		diffs = append(diffs, where+" is dormant")
	}
	if !n.present || n.post == nil {
		return append(diffs, where+" has no chain POSTROUTING")
	}
	if wrong := n.wrongHook(); wrong != "" {
		diffs = append(diffs, wrong)
	}
	jump := want.Chain(Postrouting).Bytecode(want, nil)[0]
	exact, others := n.jumps(chain, jump)
	if len(exact) == 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has no jump to %s", where, chain))
	}
	if extra := len(exact) + len(others) - 1; extra > 0 {
		diffs = append(diffs, fmt.Sprintf("%s: POSTROUTING has %d other jumps to %s", where, extra, chain))
	}
	for _, name := range WithSubchains(chain) {
		w := want.Chain(name)
		got, present := n.chains[name]
		switch {
		case !present && len(w.Rules) > 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is missing", where, name))
		case present && len(w.Rules) == 0 && len(got) == 0 && n.heldByOthers(name):
			// An empty chain has no effect, and the kernel does not delete it.
		case present && n.heads[name].Hook != nil:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has %s", where, name, n.heads[name].Hook))
		case present && len(w.Rules) == 0:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s is not in the config", where, name))
		case n.trusted[name]:
		case n.flooded[name]:
			diffs = append(diffs, fmt.Sprintf("%s: chain %s has more than %d rules", where, name, len(got)))
		case present:
			diffs = append(diffs, xtRuleDifferences(where+": chain "+name, w, want, got)...)
		}
	}
	return diffs
}

// asleep reports whether the table is dormant and has no POSTROUTING: the kernel
// rejects a transaction that both wakes a table and creates a base chain in it.
func (n *Shared) asleep() bool { return n.table.Dormant() && n.post == nil }

// wrongHook describes the hook of POSTROUTING if it differs from that of
// iptables, otherwise it returns "".
func (n *Shared) wrongHook() string {
	if n.post == nil || n.post.Hook.Equal(postroutingHook()) {
		return ""
	}
	return fmt.Sprintf("table %s nat: chain POSTROUTING has %s, not %s", n.Family, n.post.Hook, postroutingHook())
}

func xtRuleDifferences(where string, want nft.Chain, t nft.Table, got []nfnetlink.Rule) []string {
	plain := make([]nfnetlink.Rule, len(got))
	for i, r := range got {
		r.UserData = nil
		plain[i] = r
	}
	return want.Differences(where, t, nil, plain)
}

// jumps returns the rules of POSTROUTING that jump to the chain: those that are
// exactly ours, and variants of other agents and versions.
func (n *Shared) jumps(chain string, jump nfnetlink.Rule) (exact, others []nfnetlink.Rule) {
	for _, r := range n.rules {
		switch to, ok := rule.Target(r); {
		case !ok || to != chain:
		case sameXT(r, jump):
			exact = append(exact, r)
		default:
			others = append(others, r)
		}
	}
	return exact, others
}

// Unsigned reports whether the chain was read and has rules, none of which we wrote.
func (n *Shared) Unsigned(chain string) bool {
	return len(n.chains[chain]) > 0 && !n.signed(OwnChain{chain, chain})
}

// unrecognized returns the rules of the chain, and the jumps to it, if we did not
// write them or no config of this version compiles to them: another agent wrote
// them.
func (n *Shared) unrecognized(chain string) (rules, jumps []nfnetlink.Rule) {
	if _, err := n.Policy(OwnChain{chain, chain}); err == nil && !n.Unsigned(chain) {
		return nil, nil
	}
	for _, r := range n.rules {
		if to, ok := rule.Target(r); ok && to == chain {
			jumps = append(jumps, r)
		}
	}
	return n.chains[chain], jumps
}
