package xtables

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
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

// comment returns a rule's comment without quotes: ip-masq-agent v2.10.0 to v2.12.1 put literal ones around it.
func comment(r nfnetlink.Rule) string { return strings.Trim(r.Comment(), `"\ `) }

// leads reports whether a rule jumps to a chain of such an agent, by the name or the comment.
func leads(r nfnetlink.Rule) bool {
	target, jumps := r.Target()
	return jumps && (slices.Contains(agentChains, target) || agentJump.MatchString(comment(r)))
}

// An OlderChain is a chain that a masquerade agent left behind, and the jumps to it.
type OlderChain struct {
	nfnetlink.Chain
	// Ours means that it has our signature: an agent of this program wrote it.
	Ours bool
	// Hash is that of our policy, "" if another program changed the rule that has it.
	Hash string
	// Rules is the number of its rules.
	Rules int
	// Doubt is why the chain may be another program's, "" if it is certainly an agent's. With a doubt it is never removed.
	Doubt string

	table nfnetlink.Table
	rules []uint64 // the handles of its rules
	jumps []uint64 // those of the agent's rules in POSTROUTING that lead to it
	// removesTable means that without the chain the table has nothing but POSTROUTING: only we can have created the table,
	// and it goes with the chain.
	removesTable bool
}

// FindOlder finds the chains of masquerade agents that the wanted ruleset does not own, in the tables nat of
// iptables: those with an agent's name, and those to which an agent's jump leads, which are certainly an
// agent's only if all of their rules have an agent's comment. Base chains are never an agent's.
//
// Other programs may write meanwhile. What FindOlder has missed then, a later call finds.
func FindOlder(c *nfnetlink.Conn, want nft.Ruleset) ([]OlderChain, error) {
	var all []OlderChain
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		found, err := findIn(c, family, want)
		if err != nil && !nfnetlink.IsNotExist(err) {
			return nil, fmt.Errorf("search for older agents: table %s %s: %w", family, NATTable, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

func findIn(c *nfnetlink.Conn, family nfnetlink.Family, want nft.Ruleset) ([]OlderChain, error) {
	table, err := c.Table(family, NATTable)
	if err != nil {
		return nil, err
	}
	jumps, err := readJumps(c, table)
	if err != nil {
		return nil, err
	}
	names := slices.Concat(agentChains, slices.Collect(maps.Keys(jumps)))
	slices.Sort(names)
	var found []OlderChain
	for _, name := range slices.Compact(names) {
		if want.Owns(nfnetlink.Chain{Family: family, Table: NATTable, Name: name}) {
			continue
		}
		chain, err := readChain(c, table, name, jumps[name])
		if nfnetlink.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if chain.belongsToAgent() {
			found = append(found, chain)
		}
	}
	if len(found) > 0 && !want.HasTable(table) {
		found[len(found)-1].removesTable = hasOnly(c, table, found)
	}
	return found, nil
}

// hasOnly reports whether all of these chains are ours, and a table has nothing but them, POSTROUTING, and
// jumps from it.
func hasOnly(c *nfnetlink.Conn, table nfnetlink.Table, found []OlderChain) bool {
	jumps := 0
	for _, l := range found {
		if !l.Ours {
			return false
		}
		jumps += len(l.jumps)
	}
	post, err := c.Chain(table.Family, table.Name, Postrouting)
	return err == nil && int(post.Use) == jumps && int(table.Use) == len(found)+1
}

// readJumps returns the handles of the agents' rules in POSTROUTING, by the chains to which they jump.
func readJumps(c *nfnetlink.Conn, table nfnetlink.Table) (map[string][]uint64, error) {
	jumps := map[string][]uint64{}
	err := c.EachRule(table.Family, table.Name, Postrouting, func(r nfnetlink.Rule) error {
		if target, _ := r.Target(); leads(r) {
			jumps[target] = append(jumps[target], r.Handle)
		}
		return nil
	})
	if nfnetlink.IsNotExist(err) {
		return jumps, nil
	}
	return jumps, err
}

// readChain reads a chain that may be an agent's. jumps are the handles of the agents' rules that lead to it.
func readChain(c *nfnetlink.Conn, table nfnetlink.Table, name string, jumps []uint64) (OlderChain, error) {
	chain := OlderChain{table: table, jumps: jumps}
	head, err := c.Chain(table.Family, table.Name, name)
	chain.Chain = head
	if err != nil || head.Hook != nil {
		return chain, err
	}
	uncommented := uint64(0)
	err = c.EachRule(table.Family, table.Name, name, func(r nfnetlink.Rule) error {
		chain.rules = append(chain.rules, r.Handle)
		chain.Ours = chain.Ours || r.Signed()
		if hash := r.Hash(); hash != "" {
			chain.Hash = hash
		}
		if uncommented == 0 && !agentRule.MatchString(comment(r)) {
			uncommented = r.Handle
		}
		return nil
	})
	chain.Rules = len(chain.rules)
	if uncommented > 0 && !chain.Ours && !slices.Contains(agentChains, name) {
		chain.Doubt = fmt.Sprintf("its rule with handle %d has no comment of such an agent", uncommented)
	}
	return chain, err
}

// belongsToAgent reports whether a chain to which an agent's jump leads, or that has an agent's name, is one. An empty
// one to which others refer is none: it had to stay when it was emptied.
func (l OlderChain) belongsToAgent() bool {
	if l.Hook != nil {
		return false
	}
	return l.Ours || len(l.jumps) > 0 || l.Rules > 0 || l.Use == 0
}

// Removable returns the chains that are certainly an agent's.
func Removable(all []OlderChain) []OlderChain {
	return slices.DeleteFunc(slices.Clone(all), func(l OlderChain) bool { return l.Doubt != "" })
}

// RemoveOlder deletes chains with the agents' jumps to them, and nothing else. The batch requires that they are as they
// were found. A chain to which others refer stays, empty.
func RemoveOlder(chains []OlderChain, b *nfnetlink.Batch) {
	for _, l := range chains {
		b.Require(l)
		for _, handle := range l.jumps {
			b.DelRule(nfnetlink.Rule{Family: l.Family, Table: l.Table, Chain: Postrouting, Handle: handle})
		}
		for _, handle := range l.rules {
			b.DelRule(nfnetlink.Rule{Family: l.Family, Table: l.Table, Chain: l.Name, Handle: handle})
		}
		if int(l.Use) <= len(l.jumps)+len(l.rules) {
			b.DelChain(l.ID())
		}
		if l.removesTable {
			b.DelChain(nfnetlink.ChainID{Family: l.Family, Table: l.Table, Name: Postrouting})
			b.DelEmptyTable(l.table)
		}
	}
}

// Check implements [nfnetlink.Precondition]: the chain and the jumps to it are those that were found. Its rules, of which
// there can be thousands, are not read again: the transaction names those that were found, and the kernel rejects it
// if one of them is gone, or if another one holds the chain. A rule that was replaced in place goes with the chain.
func (l OlderChain) Check(c *nfnetlink.Conn) error {
	if err := c.SameTable(l.table); err != nil {
		return err
	}
	current, err := c.Chain(l.Family, l.Table, l.Name)
	if nfnetlink.IsNotExist(err) {
		return nfnetlink.ErrReadAgain
	}
	if err != nil {
		return err
	}
	if current.Use != l.Use {
		return nfnetlink.ErrReadAgain
	}
	for _, handle := range l.jumps {
		r, err := c.Rule(l.Family, l.Table, Postrouting, handle)
		if err != nil {
			return err
		}
		if target, _ := r.Target(); target != l.Name || !leads(r) {
			return nfnetlink.ErrReadAgain
		}
	}
	return nil
}

// Jumps returns how many rules, and elements of maps, lead to the chain.
func (l OlderChain) Jumps() int { return max(int(l.Use)-l.Rules, 0) }

// Reached reports whether packets may reach its rules.
func (l OlderChain) Reached() bool { return l.Rules > 0 && l.Jumps() > 0 }

// Decides reports whether packets may reach its rules, and these are certainly an iptables-based agent's.
func (l OlderChain) Decides() bool { return !l.Ours && l.Doubt == "" && l.Reached() }

// String returns the name of the chain and, unless it is ours, what exists of it.
func (l OlderChain) String() string {
	text := fmt.Sprintf("chain %s in table %s %s", nfnetlink.Quote(l.Name), l.Family, nfnetlink.Quote(l.Table))
	if l.Ours {
		return text
	}
	text += fmt.Sprintf(": %d rules", l.Rules)
	if l.Rules == 1 {
		text = strings.TrimSuffix(text, "s")
	}
	if l.Jumps() == 0 {
		text += ", to which no other rule leads"
	}
	if l.Doubt != "" {
		text += ", not removed: " + l.Doubt
	}
	return text
}

// IsOlder reports whether a rule is one of an iptables-based masquerade agent: by its comment, or by the
// name of its chain in a table nat of iptables.
func IsOlder(r nfnetlink.Rule) bool {
	ofIPTables := r.Table == NATTable && (r.Family == nfnetlink.IPv4 || r.Family == nfnetlink.IPv6)
	text := comment(r)
	return ofIPTables && slices.Contains(agentChains, r.Chain) || agentJump.MatchString(text) ||
		agentRule.MatchString(text)
}
