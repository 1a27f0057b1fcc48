package foreign

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
)

// agentChains are the chains that iptables-based masquerade agents make unless
// told otherwise: ip-masq-agent since v0.4.0; the node set-up of GCE, GKE and
// kOps; ip-masq-agent before.
var agentChains = map[string]bool{"IP-MASQ-AGENT": true, "IP-MASQ": true, "NON-MASQUERADE-DAEMON": true}

// The comments of those agents, in all versions: a word and then one of these
// sentences, or anything behind one of their own names.
var (
	agentJump = regexp.MustCompile(`^[^: ]+: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom \S+ chain$`)
	agentRule = regexp.MustCompile(`^(ip-masq|ip-masq-agent|non-masquerade-daemon): |` +
		`^[^: ]+: (local traffic is not|cluster-local traffic should not be|outbound traffic (is|should be)) subject to MASQUERADE( \(.*\))?$`)
)

// comment gives a rule's comment as it was meant: ip-masq-agent v2.10.0 to
// v2.12.1 put literal quotes around it.
func comment(r nfnetlink.Rule) string { return strings.Trim(ruletext.Comment(r), `"\ `) }

// A LegacyChain is what a masquerade agent based on iptables left behind: a
// chain, the chains of its own that it leads to, and the jumps to them.
type LegacyChain struct {
	Family nfnetlink.Family
	Table  string
	Name   string
	// Gone says that there are jumps only.
	Gone bool
	// Base is the base chain from which packets get there, nil where none do.
	Base *nfnetlink.Chain
	// Jumps are the rules elsewhere that lead here. There may be two, with and
	// without quotes in the comment.
	Jumps []nfnetlink.Rule
	// SubChains are further chains of the agent that this one leads to.
	SubChains []string
	// Held are those of all these chains to which rules or maps of others refer.
	Held []string
	// Rules counts the rules of all these chains, Strange those of them that
	// do not have the comment of an agent.
	Rules, Strange int
	// RandomFully says that it masquerades with --random-fully.
	RandomFully bool
}

// Legacy finds the chains of iptables-based agents that are not ours: by their
// names, by the comments of their rules, and by the comments of jumps to them. A
// chain of a name that is none of the agents' own is found only where a
// postrouting chain leads to it.
func Legacy(s Snapshot) []LegacyChain {
	l := legacy{chains: map[id]Chain{}, jumps: map[id][]nfnetlink.Rule{}, agent: map[id]bool{}}
	for _, c := range s.Chains {
		l.chains[chainID(c.Chain)] = c
	}
	for _, c := range s.Chains {
		l.look(c)
	}
	var out []LegacyChain
	// First those to which no other of them leads: the others come with them.
	for _, tops := range []bool{true, false} {
		for _, at := range l.order {
			if l.agent[at] && !(tops && slices.ContainsFunc(l.jumps[at], func(r nfnetlink.Rule) bool { return l.agent[chainOf(r)] })) {
				if c := l.collect(at); !c.emptied() {
					out = append(out, c)
				}
			}
		}
	}
	return out
}

type legacy struct {
	chains map[id]Chain
	jumps  map[id][]nfnetlink.Rule // by the chain that they lead to
	order  []id
	agent  map[id]bool // an agent's chains that are not collected yet
}

func chainOf(r nfnetlink.Rule) id { return id{r.Family, r.Table, r.Chain} }

// look notes the chain if it is an agent's, and the chains to which its rules
// lead that are.
func (l *legacy) look(c Chain) {
	agents := agentChains[c.Name]
	for _, r := range c.Rules {
		text := comment(r)
		fromAgent := agentJump.MatchString(text)
		agents = agents || agentRule.MatchString(text) && !fromAgent
		if chain, ok := jump(r); ok {
			to := id{c.Family, c.Table, chain}
			l.jumps[to] = append(l.jumps[to], r)
			if fromAgent || agentChains[chain] {
				l.note(to)
			}
		}
	}
	if agents {
		l.note(chainID(c.Chain))
	}
}

func (l *legacy) note(at id) {
	if c := l.chains[at]; c.Own || c.Hook != nil || l.agent[at] {
		return
	}
	l.agent[at] = true
	l.order = append(l.order, at)
}

// collect takes a chain together with those of its agent that it leads to.
func (l *legacy) collect(at id) LegacyChain {
	top, exists := l.chains[at]
	out := LegacyChain{Family: at.family, Table: at.table, Name: at.name, Gone: !exists, Base: top.Base}
	members := []id{at}
	inside := map[id]bool{at: true}
	delete(l.agent, at)
	for i := 0; i < len(members); i++ {
		for _, r := range l.chains[members[i]].Rules {
			out.Rules++
			if !agentRule.MatchString(comment(r)) {
				out.Strange++
			}
			for _, e := range r.Exprs {
				out.RandomFully = out.RandomFully || ruletext.RandomFully(e)
			}
			chain, ok := jump(r)
			if to := (id{at.family, at.table, chain}); ok && l.agent[to] {
				delete(l.agent, to)
				inside[to] = true
				members = append(members, to)
				out.SubChains = append(out.SubChains, to.name)
			}
		}
	}
	for _, m := range members {
		if c := l.chains[m]; int(c.Use) > len(c.Rules)+len(l.jumps[m]) {
			out.Held = append(out.Held, m.name)
		}
		for _, r := range l.jumps[m] {
			if !inside[chainOf(r)] {
				out.Jumps = append(out.Jumps, r)
			}
		}
	}
	return out
}

// jump gives the chain to which a rule leads by jump or goto.
func jump(r nfnetlink.Rule) (chain string, ok bool) {
	for _, e := range r.Exprs {
		if _, chain, ok := e.Verdict(); ok && chain != "" {
			return chain, true
		}
	}
	return "", false
}

// Remove deletes the chain, its sub-chains and the jumps to them, and nothing
// else. Those that are held stay, empty, as the kernel does not delete them. Of
// several chains, those that [Legacy] gave earlier are to be removed
// earlier. The transaction is refused where the rules have changed since (commit
// it with the generation of the snapshot).
func (l LegacyChain) Remove(b *nfnetlink.Batch) {
	for _, r := range l.Jumps {
		b.DelRule(r.Family, r.Table, r.Chain, r.Handle)
	}
	if l.Gone {
		return
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

// emptied reports whether nothing is left but what others hold.
func (l LegacyChain) emptied() bool {
	return !l.Gone && l.Rules+len(l.Jumps) == 0 && len(l.Held) == 1+len(l.SubChains)
}

// Decides says whether packets meet rules of this agent.
func (l LegacyChain) Decides() bool { return l.Base != nil && l.Rules > 0 && !l.Gone }

// String names the chain and says what of it is there.
func (l LegacyChain) String() string {
	name, table := nfnetlink.Printable(l.Name), l.Family.String()+" "+nfnetlink.Printable(l.Table)
	text := fmt.Sprintf("chain %s in table %s: %d rules, %d jumps", name, table, l.Rules, len(l.Jumps))
	if l.Gone {
		text = fmt.Sprintf("%d jumps to chain %s in table %s, which is gone", len(l.Jumps), name, table)
	}
	if l.RandomFully {
		text += ", random-fully"
	}
	return text
}
