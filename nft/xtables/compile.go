package xtables

import (
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A Layout is mode iptables-nft: the view that iptables shows, in the chain of this
// name.
type Layout struct{ Name string }

// Mode implements [nft.Layout].
func (Layout) Mode() nft.Mode { return nft.ModeIPTables }

// Chain implements [nft.Layout].
func (l Layout) Chain() string { return l.Name }

// Supports implements [nft.Layout]: what the view has a text for.
func (Layout) Supports(row config.Condition) bool { return row.View != "" }

// Translates implements [nft.Layout].
func (Layout) Translates() bool { return false }

// Ordered implements [nft.Layout]: each entry has a rule.
func (Layout) Ordered() bool { return true }

// RandomFully implements [nft.Layout]: the older agents do not, either.
func (Layout) RandomFully() bool { return false }

// CountersLast implements [nft.Layout]: a rule that goes takes its count along.
func (Layout) CountersLast() bool { return false }

// Check implements [nft.Layout].
func (Layout) Check(c config.Config) (warnings []config.Problem, err error) {
	var problems config.Problems
	for _, setting := range config.NeedsNFTables(c) {
		problems = append(problems, config.Problem{
			Pos: setting.Pos, Msg: fmt.Sprintf("%s needs mode %s", setting.Key, nft.ModeNFTables), PassedOver: true,
		})
	}
	if len(problems) > 0 {
		return nil, problems
	}
	if len(c.NonMasqueradeCIDRs) >= costlyRules {
		warnings = append(warnings, config.Problem{Pos: c.NonMasqueradeCIDRs[costlyRules-1].Pos, Msg: costOfRules})
	}
	return warnings, nil
}

// From costlyRules CIDRs on, what they cost is worth a warning.
const (
	costlyRules = 1_000
	costOfRules = "1,000 CIDRs or more in mode iptables-nft, which has a rule for each: every new connection passes them one by one (9 µs at 10 CIDRs, " +
		"13 µs at 1,000, 53 µs at 10,000), and repairs take seconds from 10,000 on; mode nftables has a set"
)

// Compile implements [nft.Layout].
func (l Layout) Compile(p nft.Policy, _ string) (tables []nft.Table) {
	for _, f := range p.Families {
		tables = append(tables, SharedTable(f, p, l.Name, CommentPrefixes(l.Name)[0]))
	}
	return tables
}

// The table and base chain that iptables-nft shares with everybody.
const (
	NATTable    = "nat"
	Postrouting = "POSTROUTING"
)

// Chains beside the one of the view, for policies that need more than one.
const (
	xtSourceChain = "-SRC"
	xtMasqChain   = "-MASQ"
)

// WithSubchains gives the chains that a policy may need, each before those whose
// rules name it.
func WithSubchains(chain string) []string {
	return []string{chain + xtMasqChain, chain + xtSourceChain, chain}
}

// CommentPrefixes returns what the comments of a chain's rules begin with: what is
// written, and what the first version of this agent wrote. ip-masq-agent begins them
// with its own name whatever the chain's, its predecessor with the predecessor's.
func CommentPrefixes(chain string) []string {
	if chain == "NON-MASQUERADE-DAEMON" {
		return []string{"non-masquerade-daemon"}
	}
	return []string{"ip-masq-agent", strings.ToLower(chain)}
}

// SharedTable lays a family's policy out as iptables does: the chain that the
// documentation of ip-masq-agent shows, and one jump to it. The prefix is one of
// [CommentPrefixes].
func SharedTable(f nft.FamilyPolicy, p nft.Policy, chain, prefix string) nft.Table {
	x := xtCompiler{family: f, policy: p, chain: chain, prefix: prefix}
	t := nft.Table{Family: f.Family(), Name: NATTable, Chains: x.chains()}
	t.Chains = append(t.Chains, nft.Chain{Name: Postrouting, Hook: nft.NATHook(nft.SrcNAT), Rules: []nft.Rule{x.jump(chain)}})
	return t
}

// The comment of the jump, around the chain's name.
const (
	xtJumpComment    = "ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom "
	xtJumpCommentEnd = " chain"
)

// sharedJump is the rule that leads to a chain, which may bear another name than
// its comment and its own rules say. The prefix is one of [CommentPrefixes].
func sharedJump(family nfnetlink.Family, said, to, prefix string) nfnetlink.Rule {
	x := xtCompiler{chain: said, prefix: prefix}
	return nft.Chain{Name: Postrouting, Rules: []nft.Rule{x.jump(to)}}.Bytecode(nft.Table{Family: family, Name: NATTable}, nil)[0]
}

// sharedJumpSays gives the name that the comment of such a rule says.
func sharedJumpSays(comment string) (chain string, ok bool) {
	_, chain, _ = strings.Cut(comment, xtJumpComment)
	return strings.CutSuffix(chain, xtJumpCommentEnd)
}

// postroutingHook is the hook that iptables gives POSTROUTING.
func postroutingHook() *nfnetlink.Hook { return nft.NATHook(nft.SrcNAT) }

func (x xtCompiler) jump(to string) nft.Rule {
	return x.rule(nil, xtJumpComment+x.chain+xtJumpCommentEnd, xtJump{to})
}

type xtCompiler struct {
	family nft.FamilyPolicy
	policy nft.Policy
	chain  string
	prefix string // of the comments
}

func (x xtCompiler) rule(match []nft.Node, comment string, verdict nft.Node) nft.Rule {
	return nft.Rule{Nodes: append(match, xtComment(x.prefix+": "+comment), xtNotLocal{}, xtCounter{}, verdict)}
}

func (x xtCompiler) chains() []nft.Chain {
	f := x.family
	main := nft.Chain{Name: x.chain}
	var others []nft.Chain
	masq := x.masquerades()
	force := nft.Node(xtMasquerade{RandomFully: x.policy.RandomFully})
	if len(f.List(config.KeyForceMasqueradeCIDRs).CIDRs) > 0 && len(x.policy.Ports) > 0 {
		others = append(others, nft.Chain{Name: x.chain + xtMasqChain, Rules: masq})
		force = xtGoto{x.chain + xtMasqChain}
		masq = []nft.Rule{x.rule(nil, CommentMasq, force)}
	}
	rules := append(x.lists(force), masq...)
	for _, q := range f.Questions {
		if q.Outside {
			main.Rules = append(main.Rules, x.list(q, xtGoto{x.chain + xtSourceChain})...)
		}
	}
	if len(main.Rules) == 0 {
		main.Rules = rules
		return append(others, main)
	}
	return append(others, nft.Chain{Name: x.chain + xtSourceChain, Rules: rules}, main)
}

// CommentMasq is the comment of the last rule. The comments say what a rule is for,
// after a prefix and a colon, and from them a policy is read back; those of
// the lists are in the policy's table. The texts of a plain config are those that
// the documentation of ip-masq-agent prints.
const CommentMasq = "outbound traffic should be subject to MASQUERADE (this match must come after cluster-local CIDR matches)"

// lists returns the rules before the masquerade. A list that decides for what it
// does not hold is not among them: its rules lead to these.
func (x xtCompiler) lists(force nft.Node) []nft.Rule {
	var rules []nft.Rule
	for _, q := range x.family.Questions {
		switch {
		case q.Masquerade:
			rules = append(rules, x.list(q, force)...)
		case !q.Outside:
			rules = append(rules, x.list(q, xtStop{})...)
		}
	}
	return rules
}

// list returns a rule for each entry of a list.
func (x xtCompiler) list(q nft.Question, verdict nft.Node) []nft.Rule {
	written := q.Written()
	rules := make([]nft.Rule, len(written))
	for i, c := range written {
		rules[i] = x.rule([]nft.Node{ofPrefix{c.Prefix, q.Asks == config.SourceAddress}}, q.View, verdict)
	}
	return rules
}

// masquerades gives the last rules: to the port ranges, each taken as often as
// its size says, and protocols without ports plainly.
func (x xtCompiler) masquerades() []nft.Rule {
	var rules []nft.Rule
	for _, proto := range nft.PortProtocols() {
		for _, choice := range nft.PortChoices(x.policy.Ports) {
			r := x.rule([]nft.Node{xtProtocol(proto)}, CommentMasq, xtMasquerade{x.policy.RandomFully, &choice.PortRange})
			if !choice.Last() {
				r.Nodes = insertBefore[xtCounter](r.Nodes, xtByChance{choice.Size(), choice.Remaining})
			}
			rules = append(rules, r)
		}
	}
	return append(rules, x.rule(nil, CommentMasq, xtMasquerade{RandomFully: x.policy.RandomFully}))
}

// insertBefore puts n before the first node of type T.
func insertBefore[T nft.Node](nodes []nft.Node, n nft.Node) []nft.Node {
	for i, at := range nodes {
		if _, ok := at.(T); ok {
			return slices.Insert(nodes, i, n)
		}
	}
	return append(nodes, n)
}

// Text implements [nft.Layout]: it prints the rules as iptables-save does. Rules of both families fit into
// one file, marked -4 and -6: each program passes over the other's. Chains cannot
// be marked so; the one that a family does not need is made and deleted.
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
