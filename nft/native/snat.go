package native

import (
	"fmt"
	"slices"

	"github.com/google/nftables/expr"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// snatChain is the name of the chain that selects the source address if the node
// has one of snatAddresses.
func snatChain(f nft.FamilyPolicy) string { return "snat" + f.Suffix() }

// snatSet is the name of the set with the CIDRs in the config, whether or not the
// node has such addresses. No rule refers to it.
func snatSet(f nft.FamilyPolicy) string { return config.SNATAddresses().Set + f.Suffix() }

// podMap is the name of the map with the address of an entry for each group of pods.
func podMap(r nft.SNATRule, f nft.FamilyPolicy) string {
	if r.Number == 0 {
		return "snat-by-pod" + f.Suffix()
	}
	return ruleName(r, "-by-pod", f)
}

// masquerades reports whether any traffic of the family is masqueraded with the address of the interface: that of pods,
// if the node has none of snatAddresses, or the node's own.
func masquerades(f nft.FamilyPolicy) bool {
	return len(f.SNATAddresses().Present) == 0 || !exemptsNode(f)
}

// exemptsNode reports whether nothing that the node itself sends is masqueraded: it was
// received on no interface.
func exemptsNode(f nft.FamilyPolicy) bool {
	return slices.ContainsFunc(f.Conditions, func(condition nft.Condition) bool {
		return condition.Asks == config.SentByNode || condition.Asks == config.ReceivedOn
	})
}

// snatSets returns the set with the CIDRs in the config and, for each entry with an address on the node, the sets of
// its lists and, if it has several addresses there, the map that selects one.
func snatSets(f nft.FamilyPolicy) (sets []nft.Set) {
	addresses := f.SNATAddresses()
	if len(addresses.Addresses.CIDRs) > 0 {
		sets = append(sets, nft.Set{
			Name: snatSet(f), IPv6: f.IPv6, Comment: config.SNATAddresses().Means,
			Prefixes: addresses.Addresses.Prefixes(),
		})
	}
	for _, r := range append([]nft.SNATRule{addresses}, f.SNATRules()...) {
		if len(r.Present) == 0 {
			continue
		}
		for _, l := range listsOf(r, f) {
			sets = append(sets, nft.Set{Name: l.set, IPv6: f.IPv6, Prefixes: l.Prefixes(), Comment: entryName(r)})
		}
		if len(r.Present) > 1 {
			sets = append(sets, nft.Set{
				Name: podMap(r, f), IPv6: f.IPv6, Mappings: r.Mappings(),
				Comment: "which of them, by the last byte of the pod's address",
			})
		}
	}
	return sets
}

// ruleName is the name of the chain of an entry of snatRules, and of its sets.
func ruleName(r nft.SNATRule, kind string, f nft.FamilyPolicy) string {
	return fmt.Sprintf("%s%d%s%s", nft.RuleChain, r.Number, kind, f.Suffix())
}

// An entryList is a list of an entry of snatRules, with the name of its set.
type entryList struct {
	nft.List
	set    string
	source bool
}

// listsOf returns the lists of an entry that are not empty.
func listsOf(r nft.SNATRule, f nft.FamilyPolicy) []entryList {
	lists := []entryList{{r.Sources, ruleName(r, "-from", f), true}, {r.Destinations, ruleName(r, "-to", f), false}}
	return slices.DeleteFunc(lists, func(l entryList) bool { return len(l.CIDRs) == 0 })
}

// entryName names an entry in comments.
func entryName(r nft.SNATRule) string {
	return fmt.Sprintf("%s, entry %d", config.KeySNATRules, r.Number)
}

// compileSNAT compiles the chain that selects the source address for connections of pods,
// and those of the entries of snatRules, to which it sends them; those of the node are
// masqueraded.
func compileSNAT(p nft.Policy, f nft.FamilyPolicy) (chains []nft.Chain) {
	c := nft.Chain{Name: snatChain(f)}
	own, masq := masqueradeOf(p, f)
	if !exemptsNode(f) {
		c.Rules = append(c.Rules, ownRule(own))
	}
	for _, r := range f.SNAT {
		switch {
		case len(r.Present) == 0:
		case r.Number == 0:
			c.Rules = append(c.Rules, entryTranslation(p, f, r)...)
			return append(chains, c)
		default:
			chains = append(chains, nft.Chain{Name: ruleName(r, "", f), Rules: entryTranslation(p, f, r)})
			c.Rules = append(c.Rules, entryRules(r, f)...)
		}
	}
	c.Rules = append(c.Rules, nft.Rule{Statements: []nft.Statement{masq}, Comment: "any other"})
	return append(chains, c)
}

// entryTranslation returns the rules that translate to the addresses of an entry, and to ports.
func entryTranslation(p nft.Policy, f nft.FamilyPolicy, r nft.SNATRule) []nft.Rule {
	if p.PortBlocks(f.IPv6).Count() > 0 {
		return snatBlocks(p, f, r).rules()
	}
	return portRules(nft.PortProtocols(), p.Ports, toAddress(p, f, r))
}

// toAddress returns what makes the statement that translates to an address of an entry, and to ports.
func toAddress(p nft.Policy, f nft.FamilyPolicy, r nft.SNATRule) func(*nft.PortRange) nft.Statement {
	return func(ports *nft.PortRange) nft.Statement { return sourceNAT(f, r, p.RandomFully, ports) }
}

// entryRules sends the connections that match an entry of snatRules to its chain: by one
// rule, or one for each of its interfaces.
func entryRules(r nft.SNATRule, f nft.FamilyPolicy) (rules []nft.Rule) {
	var match []nft.Statement
	for i, l := range listsOf(r, f) {
		lookup := inSet(f.IPv6, l.source, false, l.set)
		if i == 0 { // then the other is of the same family
			lookup = withFamilyCheck(f.IPv6, lookup)
		}
		match = append(match, lookup)
	}
	send := func(match []nft.Statement) {
		statements := append(match, continueIn(ruleName(r, "", f)))
		rules = append(rules, nft.Rule{Statements: statements, Comment: entryName(r)})
	}
	for _, o := range r.Interfaces {
		send(append(slices.Clip(match), byInterface(o.Name, true, false)))
	}
	if len(r.Interfaces) == 0 {
		send(match)
	}
	return rules
}

func snatText(f nft.FamilyPolicy) string { return "snat " + choose(f.IPv6, "ip6", "ip") + " to " }

// sourceNAT translates to the node's address, or to the one of several that a map has for the
// pod's group, and to ports unless they are nil.
func sourceNAT(f nft.FamilyPolicy, r nft.SNATRule, randomFully bool, ports *nft.PortRange) nft.Statement {
	var es []expr.Any
	text := snatText(f)
	if len(r.Present) == 1 {
		address := r.Present[0].String()
		if f.IPv6 && ports != nil {
			address = "[" + address + "]"
		}
		text += address
		es = append(es, &expr.Immediate{Register: reg1, Data: r.Present[0].AsSlice()})
	} else {
		lowBitsText, bits := lowBits(f.IPv6, 0xff)
		set := podMap(r, f) + nft.SideA
		text += lowBitsText + " map @" + set
		es = append(bits, &expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: set})
	}
	load, low, high := loadPorts(ports, reg2)
	n := statement(text+portsText(":", ports)+randomText(randomFully), append(es, load...)...)
	n.Exprs = append(n.Exprs, nfnetlink.SourceNAT(f.NetfilterFamily(), randomFully, reg1, low, high))
	if len(r.Present) == 1 {
		return n
	}
	return withFamilyCheck(f.IPv6, n)
}
