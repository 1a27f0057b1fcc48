package native

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// snatChain is the name of the chain that selects the source address if the node
// has one of snatAddresses.
func snatChain(f nft.FamilyPolicy) string { return "snat" + f.Suffix() }

// snatSet is the name of the set with the CIDRs in the config, whether or not the
// node has such addresses. No rule refers to it.
func snatSet(f nft.FamilyPolicy) string { return config.SNATAddresses().Set + f.Suffix() }

// podMap is the name of the map with the address for each group of pods.
func podMap(f nft.FamilyPolicy) string { return "snat-by-pod" + f.Suffix() }

// masquerades reports whether any traffic of the family is masqueraded with the
// address of the interface.
func masquerades(f nft.FamilyPolicy) bool { return len(f.SNAT.Present) == 0 || !exemptsNode(f) }

// exemptsNode reports whether nothing that the node itself sends is masqueraded: it was
// received on no interface.
func exemptsNode(f nft.FamilyPolicy) bool {
	return slices.ContainsFunc(f.Questions, func(q nft.Question) bool {
		return q.Asks == config.SentByNode || q.Asks == config.ReceivedOn
	})
}

// snatSets returns the set with the CIDRs in the config and, if there are several
// addresses, the map; and those of snatRules that the node has an address of.
func snatSets(f nft.FamilyPolicy) (sets []nft.Set) {
	if len(f.SNAT.CIDRs) > 0 {
		sets = append(sets, nft.Set{
			Name: snatSet(f), IPv6: f.IPv6, Comment: config.SNATAddresses().Means,
			Prefixes: f.SNAT.Prefixes(),
		})
	}
	sets = append(sets, byPod(f, podMap(f), f.SNAT)...)
	for _, run := range ruleRuns(f) {
		r, by := run[0], mapBy(run[0])
		if by != "" {
			sets = append(sets, nft.Set{
				Name: ruleName(r, by, f), IPv6: f.IPv6, Mappings: chainsOf(run, f), Verdicts: true,
				Comment: placesOf(run),
			})
		} else {
			for i, list := range []nft.List{r.From, r.To} {
				what := []string{"-from", "-to"}[i]
				if len(list.CIDRs) > 0 {
					sets = append(sets, nft.Set{
						Name: ruleName(r, what, f), IPv6: f.IPv6, Prefixes: list.Prefixes(), Comment: placesOf(run),
					})
				}
			}
		}
		for _, r := range run {
			sets = append(sets, byPod(f, ruleName(r, "-by-pod", f), r.SNAT)...)
		}
	}
	return sets
}

// byPod returns the map that chooses one of several addresses.
func byPod(f nft.FamilyPolicy, name string, s nft.SNAT) []nft.Set {
	if len(s.Present) < 2 {
		return nil
	}
	return []nft.Set{{
		Name: name, IPv6: f.IPv6, Mappings: s.Mappings(), Comment: "which of them, by the last byte of the pod's address",
	}}
}

// ruleName is the name of the chain of an entry of snatRules, and of its sets.
func ruleName(r nft.SNATRule, what string, f nft.FamilyPolicy) string {
	return fmt.Sprintf("%s%d%s%s", nft.RuleChain, r.Place, what, f.Suffix())
}

// placesOf names entries of snatRules.
func placesOf(run []nft.SNATRule) string {
	first, last := run[0].Place, run[len(run)-1].Place
	if first == last {
		return fmt.Sprintf("%s, entry %d", config.KeySNATRules, first)
	}
	return fmt.Sprintf("%s, entries %d to %d", config.KeySNATRules, first, last)
}

// mapBy returns how a map finds an entry of snatRules: by one of the two addresses, if
// nothing else decides whether it matches.
func mapBy(r nft.SNATRule) string {
	switch from, to := len(r.From.CIDRs) > 0, len(r.To.CIDRs) > 0; {
	case from == to || len(r.Out) > 0:
		return ""
	case from:
		return "-by-source"
	}
	return "-by-destination"
}

// ruleRuns returns the entries of snatRules of which the node has an address. Those that
// follow each other and that a map finds in the same way are together.
func ruleRuns(f nft.FamilyPolicy) (runs [][]nft.SNATRule) {
	for _, r := range f.SNATRules {
		switch last := len(runs) - 1; {
		case len(r.Present) == 0:
		case last >= 0 && mapBy(r) != "" && mapBy(r) == mapBy(runs[last][0]):
			runs[last] = append(runs[last], r)
		default:
			runs = append(runs, []nft.SNATRule{r})
		}
	}
	return runs
}

// chainsOf maps the addresses of entries of snatRules to their chains. Of entries that
// overlap, the first one has the address.
func chainsOf(run []nft.SNATRule, f nft.FamilyPolicy) (out []nfnetlink.Mapping) {
	var taken []iprange.Range
	for _, r := range run {
		list := slices.Concat(r.From.Prefixes(), r.To.Prefixes()) // it has one of them
		for _, p := range list {
			all := iprange.Of(p)
			at, _ := slices.BinarySearchFunc(taken, all.From, func(r iprange.Range, a netip.Addr) int { return r.To.Compare(a) })
			for _, free := range iprange.Subtract([]iprange.Range{all}, taken[at:]) {
				out = append(out, nfnetlink.Mapping{Keys: free, Chain: ruleName(r, "", f)})
			}
		}
		taken = iprange.Normal(slices.Concat(taken, iprange.SetOf(list)))
	}
	slices.SortStableFunc(out, func(a, b nfnetlink.Mapping) int { return a.Keys.From.Compare(b.Keys.From) })
	return out
}

// compileSNAT compiles the chain that selects the source address for connections of pods,
// and those of the entries of snatRules, to which it sends them; those of the node are
// masqueraded.
func compileSNAT(p nft.Policy, f nft.FamilyPolicy, masq nft.Node) (chains []nft.Chain) {
	c := nft.Chain{Name: snatChain(f)}
	if !exemptsNode(f) {
		c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{fromThisNode(), masq}, Comment: "from this node"})
	}
	to := func(s nft.SNAT, byPod string) []nft.Rule {
		return portRules(p.Ports, func(ports *nft.PortRange) nft.Node {
			return sourceNAT(f, s, byPod, p.RandomFully, ports)
		})
	}
	for _, run := range ruleRuns(f) {
		for _, r := range run {
			chains = append(chains, nft.Chain{Name: ruleName(r, "", f), Rules: to(r.SNAT, ruleName(r, "-by-pod", f))})
		}
		r, by := run[0], mapBy(run[0])
		if by != "" {
			match := byMap(f.IPv6, len(r.From.CIDRs) > 0, ruleName(r, by, f))
			c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{match}, Comment: placesOf(run)})
			continue
		}
		var match []nft.Node
		if len(r.From.CIDRs) > 0 {
			match = append(match, implying(f.IPv6, inSet(f.IPv6, true, false, ruleName(r, "-from", f))))
		}
		if to := inSet(f.IPv6, false, false, ruleName(r, "-to", f)); len(r.To.CIDRs) > 0 && len(match) > 0 {
			match = append(match, to) // of the same family
		} else if len(r.To.CIDRs) > 0 {
			match = append(match, implying(f.IPv6, to))
		}
		send := func(match ...nft.Node) {
			nodes := append(slices.Clip(match), continueIn(ruleName(r, "", f)))
			c.Rules = append(c.Rules, nft.Rule{Nodes: nodes, Comment: placesOf(run)})
		}
		for _, o := range r.Out {
			send(append(slices.Clip(match), byInterface(o.Name, true, false))...)
		}
		if len(r.Out) == 0 {
			send(match...)
		}
	}
	if len(f.SNAT.Present) > 0 {
		c.Rules = append(c.Rules, to(f.SNAT, podMap(f))...)
	} else {
		c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{masq}, Comment: "any other"})
	}
	return append(chains, c)
}

// sourceNAT translates to the node's address, or to the one of several that a map has for the
// pod's group, and to ports unless they are nil.
func sourceNAT(f nft.FamilyPolicy, s nft.SNAT, byPod string, randomFully bool, ports *nft.PortRange) nft.Node {
	var es []expr.Any
	if len(s.Present) == 1 {
		es = append(es, &expr.Immediate{Register: reg1, Data: s.Present[0].AsSlice()})
	} else {
		source := nfnetlink.AddressPayload(f.IPv6, true)
		mask := make([]byte, source.Len)
		mask[len(mask)-1] = 0xff
		es = append(es,
			source,
			&expr.Bitwise{
				SourceRegister: reg1, DestRegister: reg1, Len: source.Len, Mask: mask,
				Xor: make([]byte, len(mask)),
			},
			&expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: byPod + nft.SideA})
	}
	load, low, high := loadPorts(ports, reg2)
	n := nodeOf(append(nfnetlink.Marshal(nfnetlink.Inet, append(es, load...)...),
		nfnetlink.SourceNAT(f.Family(), randomFully, reg1, low, high))...)
	if len(s.Present) == 1 {
		return n
	}
	return implying(f.IPv6, n)
}
