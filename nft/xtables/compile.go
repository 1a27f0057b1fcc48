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

// A Layout is mode iptables-nft: rules that iptables lists, in the chain of this
// name.
type Layout struct{ Name string }

// Mode implements [nft.Layout].
func (Layout) Mode() nft.Mode { return nft.ModeIPTables }

// Chain implements [nft.Layout].
func (l Layout) Chain() string { return l.Name }

// MaxCIDRs is how many entries of a family the lists of a config may have: each is a
// rule, which every new connection passes.
const MaxCIDRs = 1_000

// Check implements [nft.Layout].
func (Layout) Check(c config.Config) config.Problems {
	problems := config.NeedsNFTables(c)
	for i, family := range []string{"IPv4", "IPv6"} {
		var all []config.CIDR
		for _, row := range config.Conditions() {
			for _, entry := range row.Entries(c) {
				if entry.Addr().Is6() == (i == 1) {
					all = append(all, entry)
				}
			}
		}
		if len(all) > MaxCIDRs {
			problems = append(problems, config.Problem{
				ID: "tooManyCIDRs", Level: config.Error, Pos: all[MaxCIDRs].Pos,
				Msg: fmt.Sprintf(
					"%d %s CIDRs, mode iptables-nft takes at most %d: use mode nftables", len(all), family, MaxCIDRs,
				),
			})
		}
	}
	return problems
}

// Compile implements [nft.Layout]: for each family the chain in the documentation of
// ip-masq-agent, and one jump to it.
func (l Layout) Compile(p nft.Policy, _ string) (tables []nft.Table) {
	for _, f := range p.Families {
		x := xtCompiler{family: f, policy: p, chain: l.Name}
		to := x.node("-j "+l.Name, &expr.Verdict{Kind: expr.VerdictJump, Chain: l.Name})
		jump := x.rule(xtJumpComment+l.Name+xtJumpCommentEnd, to)
		chains := append(x.chains(), nft.Chain{Name: Postrouting, Hook: postroutingHook(), Rules: []nft.Rule{jump}})
		tables = append(tables, nft.Table{Family: f.Family(), Name: NATTable, Chains: chains})
	}
	return tables
}

// The table and base chain that iptables-nft shares with all programs.
const (
	NATTable    = "nat"
	Postrouting = "POSTROUTING"
)

// Suffixes of additional chains, for policies that need more than one.
const (
	xtSourceChain = "-SRC"
	xtMasqChain   = "-MASQ"
)

// WithSubchains returns the chains that a policy may need, each before those
// whose rules refer to it.
func WithSubchains(chain string) []string {
	return []string{chain + xtMasqChain, chain + xtSourceChain, chain}
}

// The comment of the jump, before and after the chain's name.
const (
	xtJumpComment    = "ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom "
	xtJumpCommentEnd = " chain"
)

// chainInComment returns the chain's name in the comment of such a jump, of any version.
func chainInComment(comment string) (chain string, ok bool) {
	_, chain, _ = strings.Cut(comment, xtJumpComment)
	return strings.CutSuffix(chain, xtJumpCommentEnd)
}

func postroutingHook() *nfnetlink.Hook { return nft.NATHook(nft.SrcNAT) }

type xtCompiler struct {
	family nft.FamilyPolicy
	policy nft.Policy
	chain  string
}

// rule returns a rule. ip-masq-agent begins comments with its own name regardless of the
// chain, and its predecessor with the predecessor's name.
func (x xtCompiler) rule(comment string, verdict nft.Node) nft.Rule {
	prefix := "ip-masq-agent: "
	if x.chain == "NON-MASQUERADE-DAEMON" {
		prefix = "non-masquerade-daemon: "
	}
	counter := x.node("", &expr.Counter{}) // which iptables adds to every rule
	return nft.Rule{Nodes: []nft.Node{x.comment(prefix + comment), x.notLocal(), counter, verdict}}
}

func (x xtCompiler) chains() []nft.Chain {
	f := x.family
	main := nft.Chain{Name: x.chain}
	var others []nft.Chain
	masq := x.masquerades()
	force := x.masquerade(nil)
	if len(f.List(config.KeyForceMasqueradeCIDRs).CIDRs) > 0 && len(x.policy.Ports) > 0 {
		others = append(others, nft.Chain{Name: x.chain + xtMasqChain, Rules: masq})
		force = x.goTo(x.chain + xtMasqChain)
		masq = []nft.Rule{x.rule(commentMasq, force)}
	}
	rules := append(x.lists(force), masq...)
	for _, q := range f.Questions {
		if q.Outside {
			main.Rules = append(main.Rules, x.list(q, x.goTo(x.chain+xtSourceChain))...)
		}
	}
	if len(main.Rules) == 0 {
		main.Rules = rules
		return append(others, main)
	}
	return append(others, nft.Chain{Name: x.chain + xtSourceChain, Rules: rules}, main)
}

// commentMasq is the comment of the last rule. Comments describe the purpose of a rule;
// those of the lists are in the table of conditions. For a plain config they are those in
// the documentation of ip-masq-agent.
const commentMasq = "outbound traffic should be subject to MASQUERADE (this match must come after cluster-local " +
	"CIDR matches)"

// lists returns the rules before the masquerade, except for lists that decide
// about what they do not contain: their rules jump to these.
func (x xtCompiler) lists(force nft.Node) []nft.Rule {
	var rules []nft.Rule
	for _, q := range x.family.Questions {
		switch {
		case q.Masquerade:
			rules = append(rules, x.list(q, force)...)
		case !q.Outside:
			rules = append(rules, x.list(q, x.node("-j RETURN", &expr.Verdict{Kind: expr.VerdictReturn}))...)
		}
	}
	return rules
}

func (x xtCompiler) list(q nft.Question, verdict nft.Node) []nft.Rule {
	rules, same := make([]nft.Rule, len(q.Written)), x.rule(q.View, verdict).Nodes
	if q.Asks != config.SourceAddress && q.Asks != config.DestinationAddress {
		q.Unknown()
	}
	for i, c := range q.Written {
		rules[i].Nodes = append([]nft.Node{x.ofPrefix(c.Prefix, q.Asks == config.SourceAddress)}, same...)
	}
	return rules
}

// masquerades returns the last rules: to the port ranges, each with a probability
// proportional to its size, and without ports for other protocols.
func (x xtCompiler) masquerades() []nft.Rule {
	var rules []nft.Rule
	for _, proto := range nft.PortProtocols() {
		for _, choice := range nft.PortChoices(x.policy.Ports) {
			r := x.rule(commentMasq, x.masquerade(&choice.PortRange))
			if !choice.Last() {
				r.Nodes = slices.Insert(r.Nodes, len(r.Nodes)-2, x.byChance(choice)) // before the counter
			}
			r.Nodes = slices.Insert(r.Nodes, 0, x.node("-p "+proto.String(), proto.Match()...))
			rules = append(rules, r)
		}
	}
	return append(rules, x.rule(commentMasq, x.masquerade(nil)))
}

// Text implements [nft.Layout]: it prints the rules like iptables-save. The file
// has the rules of both families, marked -4 and -6: each program ignores those of
// the other family. Chains cannot be marked; one that a family does not need is
// created and deleted.
func (Layout) Text(tables []nft.Table) string {
	var b strings.Builder
	b.WriteString("*nat\n")
	var declared []string
	for _, t := range tables {
		for _, c := range t.Chains {
			if c.Hook == nil && !slices.Contains(declared, c.Name) {
				declared = append(declared, c.Name)
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.Name)
			}
		}
	}
	for _, t := range tables {
		family := ""
		if len(tables) > 1 {
			family = map[nfnetlink.Family]string{nfnetlink.IPv4: "-4 ", nfnetlink.IPv6: "-6 "}[t.Family]
		}
		for _, name := range declared {
			if len(t.Chain(name).Rules) == 0 {
				fmt.Fprintf(&b, "%s-X %s\n", family, name)
			}
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
