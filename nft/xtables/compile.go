package xtables

import (
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/expr"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A Layout is mode iptables-nft: rules that iptables lists, in a chain of this name.
type Layout struct{ ChainName string }

// Mode implements [nft.Layout].
func (Layout) Mode() nft.Mode { return nft.ModeIPTables }

// Chain implements [nft.Layout].
func (l Layout) Chain() string { return l.ChainName }

// MaxCIDRs is how many entries of a family nonMasqueradeCIDRs may have: each is a
// rule, which every new connection passes.
const MaxCIDRs = 1_000

// Check implements [nft.Layout].
func (Layout) Check(c config.Config) config.Problems {
	problems := config.NeedsNFTables(c)
	for _, family := range []string{"IPv4", "IPv6"} {
		var entries []config.CIDR
		for _, entry := range c.NonMasqueradeCIDRs {
			if entry.Addr().Is6() == (family == "IPv6") {
				entries = append(entries, entry)
			}
		}
		if len(entries) > MaxCIDRs {
			problems = append(problems, config.Problem{
				ID: "tooManyCIDRs", Level: config.Error, Pos: entries[MaxCIDRs].Pos,
				Msg: fmt.Sprintf(
					"%d %s CIDRs, mode iptables-nft takes at most %d: use mode nftables", len(entries), family, MaxCIDRs,
				),
			})
		}
	}
	return problems
}

// The table and base chain that iptables-nft shares with all programs.
const (
	NATTable    = "nat"
	Postrouting = "POSTROUTING"
)

func postroutingHook() *nfnetlink.Hook { return nft.NATHook(nft.SrcNAT) }

// Comments describe the purpose of a rule, as in the documentation of ip-masq-agent.
const (
	commentExempt = "cluster-local traffic should not be subject to MASQUERADE"
	commentMasq   = "outbound traffic should be subject to MASQUERADE (this match must come after cluster-local " +
		"CIDR matches)"
	// The comment of the jump, before and after the chain's name.
	commentJump    = "ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom "
	commentJumpEnd = " chain"
)

// Compile implements [nft.Layout]: for each family the chain in the documentation of ip-masq-agent, and one jump to it.
// The rules do not have the hash: their user data gets it when they are written, see [State.Switch].
func (l Layout) Compile(p nft.Policy, _ string) (tables []nft.Table) {
	for _, f := range p.Families {
		c := compiler{family: f, policy: p, chain: l.ChainName}
		jump := c.statement("-j "+l.ChainName, &expr.Verdict{Kind: expr.VerdictJump, Chain: l.ChainName})
		tables = append(tables, nft.Table{Family: f.NetfilterFamily(), Name: NATTable, Chains: []nft.Chain{
			{Name: l.ChainName, Rules: append(c.exempts(), c.masquerades()...)},
			{
				Name: Postrouting, Hook: postroutingHook(),
				Rules: []nft.Rule{c.rule(commentJump+l.ChainName+commentJumpEnd, jump)},
			},
		}})
	}
	return tables
}

type compiler struct {
	family nft.FamilyPolicy
	policy nft.Policy
	chain  string
}

// rule returns a rule. ip-masq-agent begins comments with its own name regardless of the
// chain, and its predecessor with the predecessor's name.
func (c compiler) rule(comment string, verdict nft.Statement) nft.Rule {
	prefix := "ip-masq-agent: "
	if c.chain == "NON-MASQUERADE-DAEMON" {
		prefix = "non-masquerade-daemon: "
	}
	counter := c.statement("", &expr.Counter{}) // which iptables adds to every rule
	return nft.Rule{Statements: []nft.Statement{c.comment(prefix + comment), c.notLocal(), counter, verdict}}
}

// exempts returns a rule for each entry of nonMasqueradeCIDRs.
func (c compiler) exempts() []nft.Rule {
	entries := c.family.List(config.KeyNonMasqueradeCIDRs).Written
	exempt := c.rule(commentExempt, c.statement("-j RETURN", &expr.Verdict{Kind: expr.VerdictReturn}))
	rules := make([]nft.Rule, len(entries))
	for i, entry := range entries {
		rules[i].Statements = append([]nft.Statement{c.destination(entry.Prefix)}, exempt.Statements...)
	}
	return rules
}

// masquerades returns the last rules: to the port ranges, each with a probability
// proportional to its size, and without ports for other protocols.
func (c compiler) masquerades() []nft.Rule {
	var rules []nft.Rule
	for _, proto := range nft.PortProtocols() {
		for _, choice := range nft.PortChoices(c.policy.Ports) {
			r := c.rule(commentMasq, c.masquerade(&choice.PortRange))
			if !choice.Last() {
				r.Statements = slices.Insert(r.Statements, len(r.Statements)-2, c.byChance(choice)) // before the counter
			}
			r.Statements = slices.Insert(r.Statements, 0, c.statement("-p "+proto.String(), proto.Match()...))
			rules = append(rules, r)
		}
	}
	return append(rules, c.rule(commentMasq, c.masquerade(nil)))
}

// Text implements [nft.Layout]: it prints the rules like iptables-save. The file
// has the rules of both families, marked -4 and -6: each program ignores those of
// the other family.
func (l Layout) Text(tables []nft.Table) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n:%s - [0:0]\n", NATTable, l.ChainName)
	for _, t := range tables {
		family := ""
		if len(tables) > 1 {
			family = map[nfnetlink.Family]string{nfnetlink.IPv4: "-4 ", nfnetlink.IPv6: "-6 "}[t.Family]
		}
		for _, c := range t.Chains {
			for _, r := range c.Rules {
				fmt.Fprintf(&b, "%s-A %s %s\n", family, c.Name, r)
			}
		}
	}
	b.WriteString("COMMIT\n")
	return b.String()
}
