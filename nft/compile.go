package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// Mode says how a policy is written into the kernel.
type Mode string

// The modes.
const (
	ModeNFTables Mode = "nftables"     // a table of our own
	ModeIPTables Mode = "iptables-nft" // the view that iptables shows
)

// Options are what the command line says of a ruleset.
type Options struct {
	Mode        Mode
	Chain       string // of mode iptables-nft
	RandomFully bool
	Ports       []PortRange
	Marks       []Mark // that are left alone where exemptions are enforced
}

// BaseChain is the chain of mode nftables that decides.
const BaseChain = "postrouting"

// The base chain runs at srcnat + 10: behind kube-proxy's and the CNI's, so
// that kube-proxy's own masquerade, which also clears its mark, comes first.
const (
	portsChain    = "to-ports"
	srcNAT        = 100 // NF_IP_PRI_NAT_SRC
	chainPriority = srcNAT + 10
)

// supports reports whether rules of the mode can express a condition.
func (m Mode) supports(row config.Condition) bool { return m != ModeIPTables || row.View != "" }

// Build parses and compiles the files of a config: the one way from the bytes to
// the rules, for the daemon and for all commands. Mistakes in the files, and keys
// that the mode cannot express, are an error of type [config.Problems].
func Build(d config.Defaults, o Options, files ...config.Source) (c config.Config, r Ruleset, warnings []config.Problem, err error) {
	c, warnings, err = config.Parse(d, files...)
	if err != nil {
		return c, Ruleset{}, warnings, err
	}
	var problems config.Problems
	for _, setting := range config.NeedsNFTables(c) {
		if o.Mode == ModeIPTables {
			problems = append(problems, config.Problem{
				Pos: setting.Pos, Msg: fmt.Sprintf("%s needs mode %s", setting.Key, ModeNFTables), PassedOver: true,
			})
		}
	}
	if len(problems) > 0 {
		return c, Ruleset{}, warnings, problems
	}
	if o.Mode == ModeIPTables && len(c.NonMasqueradeCIDRs) >= manyRules {
		warnings = append(warnings, config.Problem{Pos: c.NonMasqueradeCIDRs[manyRules-1].Pos, Msg: costOfRules})
	}
	r = Compile(c, o)
	return c, r, warnings, r.CheckChains()
}

// From manyRules CIDRs on, what mode iptables-nft costs is worth a warning.
const (
	manyRules   = 1_000
	costOfRules = "1,000 CIDRs or more in mode iptables-nft, which has a rule for each: every new connection passes them one by one (9 µs at 10 CIDRs, " +
		"13 µs at 1,000, 53 µs at 10,000), and repairs take seconds from 10,000 on; mode nftables has a set"
)

// Compile says what the kernel is to hold for a config. It is pure, and there
// is no config for which it fails: what the mode cannot express is left out.
func Compile(c config.Config, o Options) Ruleset {
	return CompilePolicy(NewPolicy(c, o), o)
}

// CompilePolicy does the same for a policy, such as one that was read back. Of
// the options mode and chain count alone.
func CompilePolicy(p Policy, o Options) Ruleset {
	r := Ruleset{Policy: p, Mode: o.Mode, digest: p.digest()}
	if o.Mode == ModeIPTables {
		r.Chain = o.Chain
		for _, f := range p.Families {
			r.Tables = append(r.Tables, SharedTable(f, p, o.Chain, CommentPrefixes(o.Chain)[0]))
		}
		return r
	}
	r.Tables = []Table{compileTable(p, r.Hash())}
	return r
}

func compileTable(p Policy, hash string) Table {
	t := Table{Family: nfnetlink.Inet, Name: TableName}
	base := Chain{Name: BaseChain, Hook: natHook(chainPriority)}
	masq := node(masquerade{RandomFully: p.RandomFully})
	if len(p.Ports) > 0 {
		t.Chains = append(t.Chains, compilePorts(p))
		masq = continueIn{portsChain}
	}
	if p.Enforce != nil {
		t.Chains = append(t.Chains, compileEnforcement(p))
	}
	for _, f := range p.Families {
		t.Counters = append(t.Counters, "local"+f.Suffix(), "exempt"+f.Suffix(), "masqueraded"+f.Suffix())
		t.Sets = append(t.Sets, f.sets()...)
		base.Rules = append(base.Rules, f.rules(masq)...)
	}
	base.Rules[len(base.Rules)-1].Comment = hashComment + hash
	t.Chains = append(t.Chains, base)
	return t
}

// hashComment begins the comment of the last rule.
const hashComment = "config "

func natHook(priority int32) *nfnetlink.Hook {
	return &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: priority}
}

// rules decides a connection's first packet; the first rule that fits ends it.
func (f FamilyPolicy) rules(masq node) []Rule {
	exempt, masqueraded := count{"exempt" + f.Suffix()}, count{"masqueraded" + f.Suffix()}
	rules := []Rule{{
		Nodes:   []node{ofFamilyMatch{f.IPv6}, ofThisNode{}, count{"local" + f.Suffix()}, stop{}},
		Comment: "to this node",
	}}
	for _, q := range f.Questions {
		for _, match := range q.matches(f) {
			r := Rule{Nodes: append(match, exempt, stop{})}
			if q.Masquerade {
				r.Nodes = append(match, masqueraded, masq)
			}
			if q.Set == "" { // a set has the comment itself
				r.Comment = q.Means
			}
			rules = append(rules, r)
		}
	}
	return append(rules, Rule{Nodes: []node{ofFamilyMatch{f.IPv6}, masqueraded, masq}})
}

// matches pass the packets for which the question decides, each some of them. A
// rule can ask whether an interface is none of several; whether it is one of them
// takes a rule for each.
func (q Question) matches(f FamilyPolicy) [][]node {
	switch {
	case q.Asks == config.SentByNode:
		return [][]node{{ofFamilyMatch{f.IPv6}, ofThisNode{Source: true}}}
	case !q.HasInterfaces():
		return [][]node{{inSet{IPv6: f.IPv6, Source: q.Asks == config.SourceAddress, Not: q.Outside, Set: q.name(f)}}}
	}
	var all [][]node
	none := []node{ofFamilyMatch{f.IPv6}}
	for _, i := range q.Interfaces {
		match := byInterface{Out: q.Asks == config.LeavingBy, Not: q.Outside, Interface: i.Name}
		all, none = append(all, []node{ofFamilyMatch{f.IPv6}, match}), append(none, match)
	}
	if q.Outside {
		return [][]node{none}
	}
	return all
}

func (f FamilyPolicy) sets() []Set {
	var sets []Set
	for _, q := range f.Questions {
		if q.Set != "" {
			sets = append(sets, Set{Name: q.name(f), IPv6: f.IPv6, Comment: q.Means, Prefixes: q.Prefixes()})
		}
	}
	return sets
}

// compilePorts masquerades to the port ranges, each taken as often as its size
// says, and protocols without ports plainly.
func compilePorts(p Policy) Chain {
	c := Chain{Name: portsChain}
	for _, proto := range toPortProtocols {
		for _, choice := range choices(p.Ports) {
			nodes := []node{proto}
			if !choice.last() {
				nodes = append(nodes, byChance{choice.Size(), choice.Remaining})
			}
			nodes = append(nodes, masquerade{RandomFully: p.RandomFully, Ports: &choice.PortRange})
			c.Rules = append(c.Rules, Rule{Nodes: nodes})
		}
	}
	c.Rules = append(c.Rules, Rule{Nodes: []node{masquerade{RandomFully: p.RandomFully}}})
	return c
}
