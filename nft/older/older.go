// Package older finds and removes what iptables-based masquerade agents, which this one
// replaces, left in the kernel. It exists so that taking over needs nothing of what
// interprets other programs' rules.
package older

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
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
func comment(r nfnetlink.Rule) string { return strings.Trim(facts.Comment(r), `"\ `) }

// Leads reports whether a rule jumps to a chain of such an agent, by the name or the comment.
func Leads(r nfnetlink.Rule) bool {
	target, ok := facts.Target(r)
	return ok && (agentChains[target] || agentJump.MatchString(comment(r)))
}

// A Chain is a chain that an iptables-based masquerade agent left behind, and the jumps to it.
type Chain struct {
	nfnetlink.ChainID
	// Base is the base chain from which packets reach it, or nil.
	Base *nfnetlink.Chain
	// Jumps are the rules that lead here, without their expressions. There may be two, with and
	// without quotes in the comment.
	Jumps []nfnetlink.Rule
	// Held means that other programs' rules or maps refer to it.
	Held  bool
	Rules int
	// RandomFully means that it masquerades with --random-fully.
	RandomFully bool
	// Kept is why the chain is not certainly the agent's, "" if it is: the agents comment all
	// of their rules, but for chains with their own names. It is never removed then.
	Kept string
}

// A Listing is what [Find] searches.
type Listing struct {
	Chains  []nfnetlink.Chain          // of ip, ip6, inet and netdev, in this order
	dormant map[nfnetlink.ChainID]bool // tables, which have no name of a chain
	// EachRule reads the rules of a chain, one after another: see [nfnetlink.Conn.EachRule].
	EachRule func(family nfnetlink.Family, table, chain string, do func(nfnetlink.Rule) error) error
}

// List lists the chains that the kernel has.
func List(c *nfnetlink.Conn) (Listing, error) {
	l := Listing{dormant: map[nfnetlink.ChainID]bool{}, EachRule: c.EachRule}
	tables, err := c.Tables(nfnetlink.AnyFamily)
	if err != nil {
		return l, err
	}
	for _, t := range tables {
		l.dormant[nfnetlink.ChainID{Family: t.Family, Table: t.Name}] = t.Dormant()
	}
	families := []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet, unix.NFPROTO_NETDEV}
	place := func(c nfnetlink.Chain) int { return slices.Index(families, c.Family) }
	all, err := c.Chains(nfnetlink.AnyFamily)
	l.Chains = slices.DeleteFunc(all, func(c nfnetlink.Chain) bool { return place(c) < 0 })
	slices.SortStableFunc(l.Chains, func(a, b nfnetlink.Chain) int { return place(a) - place(b) })
	return l, err
}

// InForce reports whether a chain is a base chain of a table that is not dormant.
func (l Listing) InForce(c nfnetlink.Chain) bool {
	return c.Hook != nil && !l.dormant[nfnetlink.ChainID{Family: c.Family, Table: c.Table}]
}

// Find finds the chains of iptables-based agents by their names, by the comments of their rules,
// and by the comments of jumps to them. A chain with a name unknown for agents is found only if
// it is reachable from a postrouting chain, and is kept unless all of its rules are an agent's.
// Ours are the chains of the wanted ruleset, those whose rules all have our signature, and one
// with the layout's name of which some have it.
func Find(all Listing, want nft.Ruleset, words facts.Words) ([]Chain, error) {
	l := search{
		Listing: all, want: want, words: words,
		chains: map[nfnetlink.ChainID]*candidate{}, jumps: map[nfnetlink.ChainID][]nfnetlink.Rule{},
	}
	if err := l.readAll(); err != nil {
		return nil, fmt.Errorf("search for older agents: %w", err)
	}
	return l.found(), nil
}

// found returns what was found in what was read. A jump may have been read before its chain
// was created, or after that was deleted. Chains that nothing but others holds are left over.
func (l *search) found() (out []Chain) {
	for _, at := range l.order {
		c, jumps := l.chains[at], l.jumps[at]
		if c == nil || c.own || c.Hook != nil {
			continue
		}
		held := int(c.Use) > c.rules+len(jumps)
		if c.rules+len(jumps) > 0 || !held {
			out = append(out, Chain{at, c.base, jumps, held, c.rules, c.randomFully, c.kept})
		}
	}
	return out
}

// Removable returns the chains that are certainly an agent's.
func Removable(all []Chain) []Chain {
	return slices.DeleteFunc(slices.Clone(all), func(l Chain) bool { return l.Kept != "" })
}

// maxRules is how many rules are read in all; there may be hundreds of thousands.
const maxRules = 60_000

type search struct {
	Listing
	words  facts.Words
	want   nft.Ruleset
	rules  int // the number of rules read
	chains map[nfnetlink.ChainID]*candidate
	jumps  map[nfnetlink.ChainID][]nfnetlink.Rule // by target chain, without their expressions
	order  []nfnetlink.ChainID                    // what may be an agent's chain, as it was found
}

// A candidate is what the search needs of a chain. Other programs have tens of thousands of
// rules, which are not kept.
type candidate struct {
	nfnetlink.Chain
	base        *nfnetlink.Chain
	own         bool
	rules       int
	randomFully bool
	targets     []string // of its jumps, in order
	kept        string   // why it is not certainly an agent's
}

// readAll reads the postrouting chains, those that can be reached from them, and those with the
// name of an agent's.
func (l *search) readAll() error {
	for _, base := range l.Chains {
		if !l.InForce(base) || base.Hook.Number != unix.NF_INET_POST_ROUTING {
			continue
		}
		for level := []nfnetlink.Chain{base}; len(level) > 0; {
			targets := map[string]bool{}
			for _, c := range level {
				if err := l.read(c, &base); err != nil {
					return err
				}
				for _, to := range l.chains[c.ID()].targets {
					targets[to] = true
				}
			}
			level = slices.DeleteFunc(slices.Clone(l.Chains), func(c nfnetlink.Chain) bool {
				return c.Family != base.Family || c.Table != base.Table || !targets[c.Name] || l.chains[c.ID()] != nil
			})
		}
	}
	for _, c := range l.Chains {
		if agentChains[c.Name] && l.chains[c.ID()] == nil {
			if err := l.read(c, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *search) note(at nfnetlink.ChainID) {
	if !slices.Contains(l.order, at) {
		l.order = append(l.order, at)
	}
}

// read reads a chain, and notes it if it is an agent's, and the agents' chains that its
// rules jump to.
func (l *search) read(of nfnetlink.Chain, base *nfnetlink.Chain) error {
	c, at := &candidate{Chain: of, base: base, own: l.want.Owns(of)}, of.ID()
	l.chains[at] = c
	agents := agentChains[of.Name]
	if agents {
		l.note(at)
	}
	if c.own || l.rules+int(of.Use) > maxRules {
		if !agents {
			c.kept = "its rules were not read, because there are too many"
		}
		return nil
	}
	named, signed := agents, 0
	err := l.EachRule(of.Family, of.Table, of.Name, func(r nfnetlink.Rule) error {
		c.rules++
		if facts.Signed(r) {
			signed++
		}
		c.randomFully = c.randomFully || facts.RandomFully(r)
		text := comment(r)
		fromAgent := agentJump.MatchString(text)
		switch ofAgent := agentRule.MatchString(text) && !fromAgent; {
		case named:
		case !ofAgent && c.kept == "":
			c.kept = fmt.Sprintf("its rule with handle %d has no comment of such an agent: %s", r.Handle, l.words.Of(r))
		case ofAgent && !agents:
			agents = true
			l.note(at)
		}
		if target, ok := facts.Target(r); ok {
			to := at
			to.Name = target
			c.targets = append(c.targets, target)
			jump := nfnetlink.Rule{Family: of.Family, Table: of.Table, Chain: of.Name, Handle: r.Handle}
			l.jumps[to] = append(l.jumps[to], jump)
			if fromAgent || agentChains[target] {
				l.note(to)
			}
		}
		return nil
	})
	c.own = signed > 0 && (signed == c.rules || l.want.Layout != nil && of.Name == l.want.Layout.Chain())
	l.rules += c.rules
	return err
}

// Remove deletes chains and the jumps to them, and nothing else. Chains that are held are only
// emptied, because the kernel does not delete them. Commit the batch with the generation before
// [Find], so that the kernel rejects it if the rules have changed since.
func Remove(chains []Chain, b *nfnetlink.Batch) {
	for _, c := range chains {
		for _, r := range c.Jumps {
			b.DelRule(r)
		}
	}
	for _, c := range chains {
		b.FlushChain(c.ChainID)
	}
	for _, c := range chains {
		if !c.Held {
			b.DelChain(c.ChainID)
		}
	}
}

// Decides reports whether packets reach rules that are certainly this agent's.
func (l Chain) Decides() bool { return l.Base != nil && l.Rules > 0 && l.Kept == "" }

// String returns the name of the chain and what exists of it.
func (l Chain) String() string {
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
	if l.Kept != "" {
		text += ", not removed: " + l.Kept
	}
	return text
}

// Wrote reports whether a rule is one of an iptables-based masquerade agent: by its comment, or by the
// name of its chain in the table nat of iptables.
func Wrote(r nfnetlink.Rule) bool {
	text := comment(r)
	inNAT := r.Table == "nat" && (r.Family == nfnetlink.IPv4 || r.Family == nfnetlink.IPv6)
	return inNAT && agentChains[r.Chain] || agentJump.MatchString(text) || agentRule.MatchString(text)
}
