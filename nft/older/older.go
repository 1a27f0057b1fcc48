// Package older finds and removes chains of masquerade agents in tables that all programs share:
// those that iptables-based agents, which this one replaces, left there, and our own of mode
// iptables-nft that are no longer wanted. It exists so that taking over needs nothing of what
// interprets other programs' rules.
package older

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// The table and the base chain of iptables in which the agents' rules are.
const (
	natTable    = "nat"
	postrouting = "POSTROUTING"
)

// agentChains are the default chains of iptables-based masquerade agents: of
// ip-masq-agent since v0.4.0; of the node setup of GCE, GKE and kOps and of older
// ip-masq-agents; and of non-masquerade-daemon.
var agentChains = []string{"IP-MASQ-AGENT", "IP-MASQ", "NON-MASQUERADE-DAEMON"}

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
func comment(r nfnetlink.Rule) string { return strings.Trim(r.Comment(), `"\ `) }

// Leads reports whether a rule jumps to a chain of such an agent, by the name or the comment.
func Leads(r nfnetlink.Rule) bool {
	target, ok := r.Target()
	return ok && (slices.Contains(agentChains, target) || agentJump.MatchString(comment(r)))
}

// A Chain is a chain that a masquerade agent left behind, and the jumps to it.
type Chain struct {
	nfnetlink.Chain
	// Ours means that it has our signature: an agent of this program wrote it.
	Ours bool
	// Hash is that of our policy, "" if another program changed the rule that has it.
	Hash string
	// Rules is the number of its rules.
	Rules int
	// RandomFully means that it masquerades with --random-fully.
	RandomFully bool
	// Kept is why the chain is not certainly an agent's, "" if it is. It is never removed then.
	Kept string

	table     nfnetlink.Table
	last      bool     // the table has nothing but POSTROUTING then, which only we can have created
	commented bool     // a rule has the comment of an iptables-based agent
	rules     []uint64 // the handles of its rules
	jumps     []uint64 // those of the agent's rules in POSTROUTING that lead to it
	targets   []string // of its jumps
}

// Find finds the chains of masquerade agents that the wanted ruleset does not own. A chain with
// an agent's name is an agent's in the tables nat of iptables. Any other is one only if all of
// its rules have an agent's comment; it is searched for under these names in every table, and in
// the tables of iptables also where an agent's jump leads. Base chains are never an agent's.
//
// Other programs may write meanwhile. What Find has missed then, a later call finds.
func Find(c *nfnetlink.Conn, want nft.Ruleset) (found []Chain, err error) {
	tables, err := c.Tables(nfnetlink.AnyFamily)
	if err != nil {
		return nil, fmt.Errorf("search for older agents: %w", err)
	}
	for _, table := range tables {
		chains, err := findIn(c, table, want)
		if err != nil && !nfnetlink.IsNotExist(err) {
			return nil, fmt.Errorf("search for older agents: table %s %s: %w", table.Family,
				nfnetlink.Printable(table.Name), err)
		}
		found = append(found, chains...)
	}
	return found, nil
}

// isNAT reports whether a table is one in which iptables-based agents have their rules.
func isNAT(family nfnetlink.Family, table string) bool {
	return table == natTable && (family == nfnetlink.IPv4 || family == nfnetlink.IPv6)
}

// isNamed reports whether a chain is an iptables-based agent's by its name.
func isNamed(family nfnetlink.Family, table, chain string) bool {
	return isNAT(family, table) && slices.Contains(agentChains, chain)
}

func findIn(c *nfnetlink.Conn, table nfnetlink.Table, want nft.Ruleset) (found []Chain, err error) {
	names := slices.Clone(agentChains)
	jumps := map[string][]uint64{}
	if isNAT(table.Family, table.Name) {
		if jumps, err = readJumps(c, table); err != nil {
			return nil, err
		}
		for target := range jumps {
			names = append(names, target)
		}
		slices.Sort(names[len(agentChains):])
	}
	read := map[string]bool{}
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		if read[name] {
			continue
		}
		read[name] = true
		if want.Owns(nfnetlink.Chain{Family: table.Family, Table: table.Name, Name: name}) {
			continue
		}
		chain, err := readChain(c, table, name, jumps[name])
		if err != nil && !nfnetlink.IsNotExist(err) {
			return nil, err
		}
		if err == nil && chain.isAgents() {
			found = append(found, chain)
			names = append(names, chain.targets...)
		}
	}
	if len(found) > 0 && isNAT(table.Family, table.Name) && !want.HasTable(table) {
		found[len(found)-1].last = isOnlyOurs(c, table, found)
	}
	return found, nil
}

// isOnlyOurs reports whether a table has nothing but these chains of ours, POSTROUTING, and jumps from it.
func isOnlyOurs(c *nfnetlink.Conn, table nfnetlink.Table, found []Chain) bool {
	jumps := 0
	for _, l := range found {
		if !l.Ours {
			return false
		}
		jumps += len(l.jumps)
	}
	post, err := c.Chain(table.Family, table.Name, postrouting)
	return err == nil && int(post.Use) == jumps && int(table.Use) == len(found)+1
}

// readJumps returns the handles of the agents' rules in POSTROUTING, by the chains to which they jump.
func readJumps(c *nfnetlink.Conn, table nfnetlink.Table) (map[string][]uint64, error) {
	jumps := map[string][]uint64{}
	err := c.EachRule(table.Family, table.Name, postrouting, func(r nfnetlink.Rule) error {
		target, _ := r.Target()
		if Leads(r) {
			jumps[target] = append(jumps[target], r.Handle)
		}
		return nil
	})
	if nfnetlink.IsNotExist(err) {
		return jumps, nil
	}
	return jumps, err
}

// readChain reads a chain, which may be an agent's, to which its jumps lead.
func readChain(c *nfnetlink.Conn, table nfnetlink.Table, name string, jumps []uint64) (Chain, error) {
	chain := Chain{table: table, jumps: jumps}
	var err error
	chain.Chain, err = c.Chain(table.Family, table.Name, name)
	if err != nil || chain.Hook != nil {
		return chain, err
	}
	uncommented := uint64(0)
	err = c.EachRule(table.Family, table.Name, name, func(r nfnetlink.Rule) error {
		chain.rules = append(chain.rules, r.Handle)
		chain.RandomFully = chain.RandomFully || r.RandomFully()
		chain.Ours = chain.Ours || r.Signed()
		if hash := r.Hash(); hash != "" {
			chain.Hash = hash
		}
		if target, ok := r.Target(); ok {
			chain.targets = append(chain.targets, target)
		}
		if agentRule.MatchString(comment(r)) {
			chain.commented = true
		} else if uncommented == 0 {
			uncommented = r.Handle
		}
		return nil
	})
	chain.Rules = len(chain.rules)
	if uncommented > 0 && !chain.Ours && !isNamed(table.Family, table.Name, name) {
		chain.Kept = fmt.Sprintf("its rule with handle %d has no comment of such an agent", uncommented)
	}
	return chain, err
}

// isAgents reports whether something of an agent is in the chain, or leads to it. What others refer to stays
// when it was emptied, and is no agent's then.
func (l Chain) isAgents() bool {
	if l.Hook != nil {
		return false
	}
	named := isNamed(l.Family, l.Table, l.Name)
	return l.Ours || l.commented || len(l.jumps) > 0 || named && (l.Rules > 0 || l.Use == 0)
}

// Removable returns the chains that are certainly an agent's.
func Removable(all []Chain) []Chain {
	return slices.DeleteFunc(slices.Clone(all), func(l Chain) bool { return l.Kept != "" })
}

// Remove deletes chains, as they were found, with the agents' jumps to them, and nothing else:
// the batch is right as long as they are as they were found. A chain to which others refer stays, empty.
func Remove(chains []Chain, b *nfnetlink.Batch) {
	references := map[nfnetlink.ChainID]int{}
	for _, l := range chains {
		b.Require(l)
		for _, handle := range l.jumps {
			b.DelRule(nfnetlink.Rule{Family: l.Family, Table: l.Table, Chain: postrouting, Handle: handle})
		}
		for _, handle := range l.rules {
			b.DelRule(nfnetlink.Rule{Family: l.Family, Table: l.Table, Chain: l.Name, Handle: handle})
		}
		references[l.ID()] += len(l.jumps) + len(l.rules)
		for _, target := range l.targets {
			references[nfnetlink.ChainID{Family: l.Family, Table: l.Table, Name: target}]++
		}
	}
	for _, l := range chains {
		if int(l.Use) <= references[l.ID()] {
			b.DelChain(l.ID())
		}
		if l.last {
			b.DelChain(nfnetlink.ChainID{Family: l.Family, Table: l.Table, Name: postrouting})
			b.DelEmptyTable(l.table)
		}
	}
}

// Check implements [nfnetlink.Condition]: the chain is as it was found, and so are the jumps to it.
func (l Chain) Check(c *nfnetlink.Conn) error {
	if err := c.SameTable(l.table); err != nil {
		return err
	}
	if l.Ours {
		return l.checkOurs(c)
	}
	current, err := readChain(c, l.table, l.Name, l.jumps)
	if err != nil {
		return err
	}
	if current.Use != l.Use || current.Ours != l.Ours || current.Kept != l.Kept || !slices.Equal(current.rules, l.rules) {
		return nfnetlink.ErrInterrupted
	}
	return l.checkJumps(c)
}

// checkOurs checks a chain of ours, which can have thousands of rules: whoever replaces one of them in place loses
// that rule with the chain. One that was added has no handle here, so the kernel would not delete the chain.
func (l Chain) checkOurs(c *nfnetlink.Conn) error {
	current, err := c.Chain(l.Family, l.Table, l.Name)
	switch {
	case nfnetlink.IsNotExist(err):
		return nfnetlink.ErrInterrupted
	case err != nil:
		return err
	case current.Use != l.Use:
		return nfnetlink.ErrInterrupted
	}
	return l.checkJumps(c)
}

// checkJumps checks that the rules with the handles of the jumps still lead here.
func (l Chain) checkJumps(c *nfnetlink.Conn) error {
	for _, handle := range l.jumps {
		r, err := c.Rule(l.Family, l.Table, postrouting, handle)
		if err != nil {
			return err
		}
		target, _ := r.Target()
		if target != l.Name || !Leads(r) {
			return nfnetlink.ErrInterrupted
		}
	}
	return nil
}

// Jumps returns how many rules, and elements of maps, lead to the chain.
func (l Chain) Jumps() int { return max(int(l.Use)-l.Rules, 0) }

// Reached reports whether packets may reach its rules.
func (l Chain) Reached() bool { return l.Rules > 0 && l.Jumps() > 0 }

// Decides reports whether packets may reach rules that are certainly an iptables-based agent's.
func (l Chain) Decides() bool { return !l.Ours && l.Kept == "" && l.Reached() }

// String returns the name of the chain and, unless it is ours, what exists of it.
func (l Chain) String() string {
	text := fmt.Sprintf("chain %s in table %s %s", nfnetlink.Printable(l.Name), l.Family, nfnetlink.Printable(l.Table))
	if l.Ours {
		return text
	}
	if l.Rules == 1 {
		text += ": 1 rule"
	} else {
		text += fmt.Sprintf(": %d rules", l.Rules)
	}
	if l.Jumps() == 0 {
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
	return isNamed(r.Family, r.Table, r.Chain) || agentJump.MatchString(text) || agentRule.MatchString(text)
}
