package native

import (
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// A Layout is mode nftables: a separate table, with sets.
type Layout struct{}

// Mode implements [nft.Layout].
func (Layout) Mode() nft.Mode { return nft.ModeNFTables }

// Chain implements [nft.Layout]: the names of the chains are fixed.
func (Layout) Chain() string { return "" }

// Check implements [nft.Layout]: this layout can express every config.
func (Layout) Check(config.Config) config.Problems { return nil }

// BaseChain is the chain that masquerades.
const BaseChain = "postrouting"

// The base chain runs at srcnat + 10: after kube-proxy's and the CNI's, so that
// kube-proxy's own masquerade, which also clears its mark, comes first.
const (
	portsChain    = "to-ports"
	chainPriority = nft.SrcNAT + 10
)

// Compile implements [nft.Layout].
func (Layout) Compile(p nft.Policy, hash string) []nft.Table {
	t := nft.Table{Family: nfnetlink.Inet, Name: nft.TableName}
	base := nft.Chain{Name: BaseChain, Hook: nft.NATHook(chainPriority)}
	if slices.ContainsFunc(p.Families, func(f nft.FamilyPolicy) bool { return restrictsPorts(p, f) && masquerades(f) }) {
		t.Chains = append(t.Chains, compilePorts(p))
	}
	t.Chains = append(t.Chains, compileBlocks(p)...)
	for _, f := range p.Families {
		if f.HasPresentAddress() {
			t.Chains = append(t.Chains, compileSNAT(p, f)...)
		}
	}
	if p.Enforce != nil {
		t.Chains = append(t.Chains, compileEnforcement(p))
	}
	if slices.ContainsFunc(p.Families, p.Drops) {
		t.Chains = append(t.Chains, compileUntranslated(p)...)
	}
	for _, f := range p.Families {
		t.Counters = append(t.Counters, "local"+f.Suffix(), "exempt"+f.Suffix(), "masqueraded"+f.Suffix())
		if p.Drops(f) {
			t.Counters = append(t.Counters, invalidCounter(f))
		}
		t.Sets = append(t.Sets, conditionSets(f)...)
		if p.Enforces(f) {
			t.Sets = append(t.Sets, nft.Set{
				Name: selfSet(f), IPv6: f.IPv6, Learned: true,
				Comment: "pairs of a source and itself",
			})
		}
		_, translate := masqueradeOf(p, f)
		if f.HasPresentAddress() {
			translate = continueIn(snatChain(f))
		}
		base.Rules = append(base.Rules, familyRules(f, translate)...)
	}
	for _, u := range blockUses(p) {
		t.Sets = append(t.Sets, u.sets()...)
	}
	base.Rules[len(base.Rules)-1].Comment = hashComment + hash
	t.Chains = append(t.Chains, base)
	return []nft.Table{t}
}

// restrictsPorts reports whether all masqueraded connections of a family get their ports from the same ranges.
func restrictsPorts(p nft.Policy, f nft.FamilyPolicy) bool {
	return len(p.Ports) > 0 && p.PortBlocks(f.IPv6).Count() == 0
}

// masqueradeOf returns the statements that masquerade a family's connections: those that the node itself opened, and
// any.
func masqueradeOf(p nft.Policy, f nft.FamilyPolicy) (own, general nft.Statement) {
	if p.PortBlocks(f.IPv6).Count() > 0 {
		return continueIn(nodePortsChain), continueIn(podPortsChain)
	}
	general = masquerade(p.RandomFully, nil)
	if restrictsPorts(p, f) {
		general = continueIn(portsChain)
	}
	return general, general
}

// hashComment is the beginning of the last rule's comment.
const hashComment = "config "

// familyRules returns the rules for a connection's first packet; the first rule that
// matches applies.
func familyRules(f nft.FamilyPolicy, masq nft.Statement) []nft.Rule {
	rules := []nft.Rule{{
		Statements: []nft.Statement{ofFamily(f.IPv6), toThisNode(), count("local" + f.Suffix()), stop()},
		Comment:    "to this node",
	}}
	return append(rules, decisions(f,
		[]nft.Statement{count("exempt" + f.Suffix()), stop()}, []nft.Statement{count("masqueraded" + f.Suffix()), masq})...)
}

// decisions returns the rules of a family's conditions: what is done with exempt packets,
// and with those that are to be masqueraded.
func decisions(f nft.FamilyPolicy, exempt, masqueraded []nft.Statement) (rules []nft.Rule) {
	for _, condition := range f.Conditions {
		for _, match := range matches(condition, f) {
			r := nft.Rule{Statements: append(match, exempt...)}
			if condition.Masquerade {
				r.Statements = append(match, masqueraded...)
			}
			if condition.Set == "" { // otherwise the set has the comment
				r.Comment = condition.Means
			}
			rules = append(rules, r)
		}
	}
	return append(rules, nft.Rule{Statements: append([]nft.Statement{ofFamily(f.IPv6)}, masqueraded...)})
}

// matches returns the matches of the rules for the packets that meet a condition. One rule can check that an interface
// is none of several; checking that it is one of them takes a rule for each.
func matches(condition nft.Condition, f nft.FamilyPolicy) [][]nft.Statement {
	switch condition.Asks {
	case config.SentByNode:
		return [][]nft.Statement{{ofFamily(f.IPv6), fromThisNode()}}
	case config.SourceAddress, config.DestinationAddress:
		match := inSet(f.IPv6, condition.Asks == config.SourceAddress, condition.Outside, condition.Name(f))
		return [][]nft.Statement{{withFamilyCheck(f.IPv6, match)}}
	case config.ReceivedOn, config.LeavingBy:
	default:
		condition.Unknown()
	}
	var alternatives [][]nft.Statement
	conjunction := []nft.Statement{ofFamily(f.IPv6)}
	for _, i := range condition.Interfaces {
		match := byInterface(i.Name, condition.Asks == config.LeavingBy, condition.Outside)
		alternatives = append(alternatives, []nft.Statement{ofFamily(f.IPv6), match})
		conjunction = append(conjunction, match)
	}
	if condition.Outside {
		return [][]nft.Statement{conjunction}
	}
	return alternatives
}

// conditionSets returns the sets of a family's conditions, and those of its SNAT.
func conditionSets(f nft.FamilyPolicy) []nft.Set {
	var sets []nft.Set
	for _, condition := range f.Conditions {
		if condition.Set != "" {
			sets = append(sets, nft.Set{
				Name: condition.Name(f), IPv6: f.IPv6, Comment: condition.Means, Prefixes: condition.Prefixes(),
			})
		}
	}
	return append(sets, snatSets(f)...)
}

// compilePorts returns the chain of toPorts.
func compilePorts(p nft.Policy) nft.Chain {
	translate := func(ports *nft.PortRange) nft.Statement { return masquerade(p.RandomFully, ports) }
	return nft.Chain{Name: portsChain, Rules: portRules(nft.PortProtocols(), p.Ports, translate)}
}

// portRules translates to port ranges, each with a probability proportional to
// its size, and without ports for other protocols.
func portRules(
	protocols []nft.Protocol, ranges []nft.PortRange, translate func(*nft.PortRange) nft.Statement,
) []nft.Rule {
	var rules []nft.Rule
	for _, proto := range protocols {
		for _, choice := range nft.PortChoices(ranges) {
			statements := []nft.Statement{ofProtocol(proto)}
			if !choice.Last() {
				statements = append(statements, byChance(choice))
			}
			rules = append(rules, nft.Rule{Statements: append(statements, translate(&choice.PortRange))})
		}
	}
	return append(rules, nft.Rule{Statements: []nft.Statement{translate(nil)}})
}
