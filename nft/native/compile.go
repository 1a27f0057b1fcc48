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

// Check implements [nft.Layout]: it can express everything.
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
	if slices.ContainsFunc(p.Families, func(f nft.FamilyPolicy) bool { return toPorts(p, f) && masquerades(f) }) {
		t.Chains = append(t.Chains, compilePorts(p))
	}
	t.Chains = append(t.Chains, compileBlocks(p)...)
	for _, f := range p.Families {
		if f.Translates() {
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
		t.Sets = append(t.Sets, setsOf(f)...)
		if p.Enforces(f) {
			t.Sets = append(t.Sets, nft.Set{
				Name: selfSet(f), IPv6: f.IPv6, Learned: true,
				Comment: "pairs of a source and itself",
			})
		}
		_, translate := masqueradeOf(p, f)
		if f.Translates() {
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

func toPorts(p nft.Policy, f nft.FamilyPolicy) bool {
	return len(p.Ports) > 0 && p.PortBlocks(f.IPv6).Count() == 0
}

// masqueradeOf returns the statements that masquerade a family's connections: those that the node itself opened, and
// any.
func masqueradeOf(p nft.Policy, f nft.FamilyPolicy) (own, general nft.Node) {
	switch plain := masquerade(p.RandomFully, nil); {
	case p.PortBlocks(f.IPv6).Count() > 0:
		return continueIn(nodePortsChain), continueIn(podPortsChain)
	case toPorts(p, f):
		return continueIn(portsChain), continueIn(portsChain)
	default:
		return plain, plain
	}
}

// hashComment is the beginning of the last rule's comment.
const hashComment = "config "

// familyRules returns the rules for a connection's first packet; the first rule that
// matches applies.
func familyRules(f nft.FamilyPolicy, masq nft.Node) []nft.Rule {
	rules := []nft.Rule{{
		Nodes:   []nft.Node{ofFamily(f.IPv6), toThisNode(), count("local" + f.Suffix()), stop()},
		Comment: "to this node",
	}}
	return append(rules, decisions(f,
		[]nft.Node{count("exempt" + f.Suffix()), stop()}, []nft.Node{count("masqueraded" + f.Suffix()), masq})...)
}

// decisions returns the rules of a family's conditions: what is done with exempt packets,
// and with those that are to be masqueraded.
func decisions(f nft.FamilyPolicy, exempt, masqueraded []nft.Node) (rules []nft.Rule) {
	for _, q := range f.Questions {
		for _, match := range matches(q, f) {
			r := nft.Rule{Nodes: append(match, exempt...)}
			if q.Masquerade {
				r.Nodes = append(match, masqueraded...)
			}
			if q.Set == "" { // otherwise the set has the comment
				r.Comment = q.Means
			}
			rules = append(rules, r)
		}
	}
	return append(rules, nft.Rule{Nodes: append([]nft.Node{ofFamily(f.IPv6)}, masqueraded...)})
}

// matches returns the matches, one per rule, for the packets that the question
// decides. One rule can check that an interface is none of several; checking that
// it is one of them takes a rule for each.
func matches(q nft.Question, f nft.FamilyPolicy) [][]nft.Node {
	switch q.Asks {
	case config.SentByNode:
		return [][]nft.Node{{ofFamily(f.IPv6), fromThisNode()}}
	case config.SourceAddress, config.DestinationAddress:
		return [][]nft.Node{{implying(f.IPv6, inSet(f.IPv6, q.Asks == config.SourceAddress, q.Outside, q.Name(f)))}}
	case config.ReceivedOn, config.LeavingBy:
	default:
		q.Unknown()
	}
	var alternatives [][]nft.Node
	conjunction := []nft.Node{ofFamily(f.IPv6)}
	for _, i := range q.Interfaces {
		match := byInterface(i.Name, q.Asks == config.LeavingBy, q.Outside)
		alternatives = append(alternatives, []nft.Node{ofFamily(f.IPv6), match})
		conjunction = append(conjunction, match)
	}
	if q.Outside {
		return [][]nft.Node{conjunction}
	}
	return alternatives
}

func setsOf(f nft.FamilyPolicy) []nft.Set {
	var sets []nft.Set
	for _, q := range f.Questions {
		if q.Set != "" {
			sets = append(sets, nft.Set{Name: q.Name(f), IPv6: f.IPv6, Comment: q.Means, Prefixes: q.Prefixes()})
		}
	}
	return append(sets, snatSets(f)...)
}

func compilePorts(p nft.Policy) nft.Chain {
	return nft.Chain{Name: portsChain, Rules: portRules(nft.PortProtocols(), p.Ports, func(ports *nft.PortRange) nft.Node {
		return masquerade(p.RandomFully, ports)
	})}
}

// portRules translates to port ranges, each with a probability proportional to
// its size, and without ports for other protocols.
func portRules(protocols []nft.Protocol, ranges []nft.PortRange, translate func(*nft.PortRange) nft.Node) []nft.Rule {
	var rules []nft.Rule
	for _, proto := range protocols {
		for _, choice := range nft.PortChoices(ranges) {
			nodes := []nft.Node{ofProtocol(proto)}
			if !choice.Last() {
				nodes = append(nodes, byChance(choice))
			}
			rules = append(rules, nft.Rule{Nodes: append(nodes, translate(&choice.PortRange))})
		}
	}
	return append(rules, nft.Rule{Nodes: []nft.Node{translate(nil)}})
}
