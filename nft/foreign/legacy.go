package foreign

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// agentChains are the default chains of iptables-based masquerade agents: of
// ip-masq-agent since v0.4.0; of the node setup of GCE, GKE and kOps and of older
// ip-masq-agents; and of non-masquerade-daemon.
var agentChains = map[string]bool{"IP-MASQ-AGENT": true, "IP-MASQ": true, "NON-MASQUERADE-DAEMON": true}

// The comments of those agents, in all versions: a word and then one of these
// sentences, or anything after one of the agents' names.
var (
	agentJump = regexp.MustCompile(
		`^[^: ]+: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom \S+ chain$`)
	agentRule = regexp.MustCompile(`^(ip-masq|ip-masq-agent|non-masquerade-daemon): |` +
		`^[^: ]+: (local traffic is not|cluster-local traffic should not be|outbound traffic (is|should be)) ` +
		`subject to MASQUERADE( \(.*\))?$`)
)

// comment returns a rule's comment without quotes: ip-masq-agent v2.10.0 to
// v2.12.1 put literal ones around it.
func comment(r nfnetlink.Rule) string { return strings.Trim(rule.Comment(r), `"\ `) }

// A LegacyChain is what an iptables-based masquerade agent left behind: a chain,
// the agent's other chains that it jumps to, and the jumps to them.
type LegacyChain struct {
	Family nfnetlink.Family
	Table  string
	Name   string
	// Base is the base chain from which packets reach it, or nil.
	Base *nfnetlink.Chain
	// Jumps are the rules in other chains that jump here. There may be two, with
	// and without quotes in the comment.
	Jumps []nfnetlink.Rule
	// SubChains are the agent's other chains that this one jumps to.
	SubChains []string
	// Held are those of all these chains that other programs' rules or maps refer to.
	Held  []string
	Rules int // in all these chains
	// RandomFully means that it masquerades with --random-fully.
	RandomFully bool
}

// Legacy finds the chains of iptables-based agents, other than ours: by their
// names, by the comments of their rules, and by the comments of jumps to them. A
// chain with a name unknown for agents is found only if it is reachable from a
// postrouting chain.
func Legacy(s Snapshot) []LegacyChain {
	l := legacy{chains: s.byID(), jumps: map[id][]nfnetlink.Rule{}, agent: map[id]bool{}}
	for _, c := range s.Chains {
		l.classify(c)
	}
	var out []LegacyChain
	// First the top-level ones: collect includes the chains that they jump to.
	for _, topLevel := range []bool{true, false} {
		for _, at := range l.order {
			below := slices.ContainsFunc(l.jumps[at], func(r nfnetlink.Rule) bool { return l.agent[chainOf(r)] })
			if l.agent[at] && !(topLevel && below) {
				if c := l.collect(at); !c.emptied() {
					out = append(out, c)
				}
			}
		}
	}
	return out
}

type legacy struct {
	chains map[id]*Chain
	jumps  map[id][]nfnetlink.Rule // by target chain
	order  []id
	agent  map[id]bool // agents' chains not collected yet
}

func chainOf(r nfnetlink.Rule) id { return id{r.Family, r.Table, r.Chain} }

// classify records the chain if it is an agent's, and the agents' chains that its
// rules jump to.
func (l *legacy) classify(c Chain) {
	agents := agentChains[c.Name]
	for _, r := range c.Rules {
		text := comment(r)
		fromAgent := agentJump.MatchString(text)
		agents = agents || agentRule.MatchString(text) && !fromAgent
		if chain, ok := rule.Target(r); ok {
			to := id{c.Family, c.Table, chain}
			l.jumps[to] = append(l.jumps[to], r)
			if fromAgent || agentChains[chain] {
				l.add(to)
			}
		}
	}
	if agents {
		l.add(chainID(c.Chain))
	}
}

func (l *legacy) add(at id) {
	if c := l.chains[at]; !l.agent[at] && c != nil && !c.Own && c.Hook == nil {
		l.agent[at] = true
		l.order = append(l.order, at)
	}
}

// collect returns a chain together with the chains of the same agent that it
// jumps to.
func (l *legacy) collect(at id) LegacyChain {
	out := LegacyChain{Family: at.family, Table: at.table, Name: at.name, Base: l.chains[at].Base}
	members := []id{at}
	inside := map[id]bool{at: true}
	delete(l.agent, at)
	for i := 0; i < len(members); i++ {
		c := l.chains[members[i]]
		out.Rules += len(c.Rules)
		if int(c.Use) > len(c.Rules)+len(l.jumps[members[i]]) {
			out.Held = append(out.Held, members[i].name)
		}
		for _, r := range c.Rules {
			out.RandomFully = out.RandomFully || rule.RandomFully(r)
			chain, ok := rule.Target(r)
			if to := (id{at.family, at.table, chain}); ok && l.agent[to] {
				delete(l.agent, to)
				inside[to] = true
				members = append(members, to)
				out.SubChains = append(out.SubChains, to.name)
			}
		}
	}
	for _, m := range members {
		for _, r := range l.jumps[m] {
			if !inside[chainOf(r)] {
				out.Jumps = append(out.Jumps, r)
			}
		}
	}
	return out
}

// Remove deletes the chain, its sub-chains and the jumps to them, and nothing
// else. Chains in Held are only emptied, because the kernel does not delete them.
// Remove several chains in the order in which [Legacy] returned them. Commit the
// batch with the generation of the snapshot, so that the kernel rejects it if the
// rules have changed since.
func (l LegacyChain) Remove(b *nfnetlink.Batch) {
	for _, r := range l.Jumps {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
	chains := append([]string{l.Name}, l.SubChains...)
	for _, chain := range chains {
		b.FlushChain(l.Family, l.Table, chain)
	}
	for _, chain := range chains {
		if !slices.Contains(l.Held, chain) {
			b.DelChain(l.Family, l.Table, chain)
		}
	}
}

// emptied reports whether only empty chains are left that others refer to.
func (l LegacyChain) emptied() bool {
	return l.Rules+len(l.Jumps) == 0 && len(l.Held) == 1+len(l.SubChains)
}

// Decides reports whether packets reach rules of this agent.
func (l LegacyChain) Decides() bool { return l.Base != nil && l.Rules > 0 }

// String returns the name of the chain and what exists of it.
func (l LegacyChain) String() string {
	text := fmt.Sprintf("chain %s in table %s %s: %d rules", nfnetlink.Printable(l.Name), l.Family,
		nfnetlink.Printable(l.Table), l.Rules)
	if l.Rules == 1 {
		text = strings.TrimSuffix(text, "s")
	}
	if len(l.Jumps) == 0 {
		text += ", to which no other rule leads"
	}
	if l.RandomFully {
		text += ", random-fully"
	}
	return text
}
