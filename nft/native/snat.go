package native

import (
	"fmt"
	"maps"
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
// addresses, the map; and the same of snatRules that the node has an address of.
func snatSets(f nft.FamilyPolicy) (sets []nft.Set) {
	if len(f.SNAT.CIDRs) > 0 {
		sets = append(sets, nft.Set{
			Name: snatSet(f), IPv6: f.IPv6, Comment: config.SNATAddresses().Means,
			Prefixes: f.SNAT.Prefixes(),
		})
	}
	sets = append(sets, byPod(f, podMap(f), f.SNAT)...)
	for _, run := range ruleRuns(f) {
		r := run[0]
		if bySource(r) {
			sets = append(sets, nft.Set{
				Name: ruleName(r, "by-source", f), IPv6: f.IPv6, Mappings: mappingsOf(run), Interval: true,
				Comment: "the address of " + placesOf(run) + ", by the source",
			})
			continue
		}
		for i, list := range []nft.List{r.From, r.To} {
			what := []string{"from", "to"}[i]
			if len(list.CIDRs) > 0 {
				sets = append(sets, nft.Set{
					Name: ruleName(r, what, f), IPv6: f.IPv6, Prefixes: list.Prefixes(), Comment: what + " of " + placesOf(run),
				})
			}
		}
		sets = append(sets, byPod(f, ruleName(r, "by-pod", f), r.SNAT)...)
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

// ruleName is the name of a set of an entry of snatRules.
func ruleName(r nft.SNATRule, what string, f nft.FamilyPolicy) string {
	return fmt.Sprintf("snat-rule-%d-%s%s", r.Place, what, f.Suffix())
}

// placesOf names entries of snatRules.
func placesOf(run []nft.SNATRule) string {
	first, last := run[0].Place, run[len(run)-1].Place
	if first == last {
		return fmt.Sprintf("%s, entry %d", config.KeySNATRules, first)
	}
	return fmt.Sprintf("%s, entries %d to %d", config.KeySNATRules, first, last)
}

// bySource reports whether one lookup of the source can answer an entry of snatRules.
func bySource(r nft.SNATRule) bool { return len(r.To.CIDRs)+len(r.Out) == 0 && len(r.Present) == 1 }

// ruleRuns returns the entries of snatRules of which the node has an address. Those that
// follow each other and depend on the source alone are together: one map answers them.
func ruleRuns(f nft.FamilyPolicy) (runs [][]nft.SNATRule) {
	for _, r := range f.SNATRules {
		switch last := len(runs) - 1; {
		case len(r.Present) == 0:
		case last >= 0 && bySource(r) && bySource(runs[last][0]):
			runs[last] = append(runs[last], r)
		default:
			runs = append(runs, []nft.SNATRule{r})
		}
	}
	return runs
}

// mappingsOf maps the sources of entries of snatRules to their addresses. Of entries that
// overlap, the first one has the source.
func mappingsOf(run []nft.SNATRule) []nfnetlink.Mapping {
	var taken []iprange.Range
	values := map[iprange.Range]netip.Addr{}
	for _, r := range run {
		for _, p := range r.From.Prefixes() {
			all := iprange.Of(p)
			at, _ := slices.BinarySearchFunc(taken, all.From, func(r iprange.Range, a netip.Addr) int { return r.To.Compare(a) })
			for _, free := range iprange.Subtract([]iprange.Range{all}, taken[at:]) {
				values[free] = r.Present[0]
			}
		}
		taken = iprange.Normal(slices.Concat(taken, iprange.SetOf(r.From.Prefixes())))
	}
	byAddress := func(a, b iprange.Range) int { return a.From.Compare(b.From) }
	var out []nfnetlink.Mapping
	for _, r := range slices.SortedFunc(maps.Keys(values), byAddress) {
		out = append(out, nfnetlink.Mapping{Key: r.From, Value: values[r]})
		if next := r.To.Next(); next.IsValid() {
			out = append(out, nfnetlink.Mapping{Key: next})
		}
	}
	return out
}

// compileSNAT compiles the chain that selects the source address for connections
// of pods; those of the node are masqueraded.
func compileSNAT(p nft.Policy, f nft.FamilyPolicy, masq nft.Node) nft.Chain {
	c := nft.Chain{Name: snatChain(f)}
	if !exemptsNode(f) {
		c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{fromThisNode(), masq}, Comment: "from this node"})
	}
	add := func(to sourceNAT, s nft.SNAT, match []nft.Node, comment string) {
		to.IPv6, to.RandomFully = f.IPv6, p.RandomFully
		if len(s.Present) == 1 && !to.Whole {
			to.To = s.Present[0]
		}
		for _, r := range portRules(p.Ports, to.node) {
			c.Rules = append(c.Rules, nft.Rule{Nodes: slices.Concat(match, r.Nodes), Comment: comment})
		}
	}
	for _, run := range ruleRuns(f) {
		r := run[0]
		if bySource(r) {
			add(sourceNAT{Map: ruleName(r, "by-source", f), Whole: true}, r.SNAT, nil, placesOf(run))
			continue
		}
		var match []nft.Node
		if len(r.From.CIDRs) > 0 {
			match = append(match, implying(f.IPv6, inSet(f.IPv6, true, false, ruleName(r, "from", f))))
		}
		if to := inSet(f.IPv6, false, false, ruleName(r, "to", f)); len(r.To.CIDRs) > 0 && len(match) > 0 {
			match = append(match, to)
		} else if len(r.To.CIDRs) > 0 {
			match = append(match, implying(f.IPv6, to))
		}
		to := sourceNAT{Map: ruleName(r, "by-pod", f), Known: len(match) > 0}
		if len(r.Out) == 0 {
			add(to, r.SNAT, match, placesOf(run))
		}
		for _, o := range r.Out {
			add(to, r.SNAT, append(slices.Clip(match), byInterface(o.Name, true, false)), placesOf(run))
		}
	}
	if len(f.SNAT.Present) == 0 {
		c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{masq}, Comment: "any other"})
		return c
	}
	add(sourceNAT{Map: podMap(f)}, f.SNAT, nil, "")
	return c
}

// sourceNAT translates to an address of the node: a fixed one, or that which a map has for
// the source or for the pod's group. Without one in the map, the next rule applies.
type sourceNAT struct {
	IPv6        bool
	To          netip.Addr // the zero address: see Map
	Map         string
	Whole       bool // the map is by the whole source
	Known       bool // the rule compares an address of the family before
	RandomFully bool
}

// node returns the statement, with ports unless they are nil.
func (s sourceNAT) node(ports *nft.PortRange) nft.Node {
	var es []expr.Any
	if s.To.IsValid() {
		es = append(es, &expr.Immediate{Register: reg1, Data: s.To.AsSlice()})
	} else {
		source := nfnetlink.AddressPayload(s.IPv6, true)
		if es = append(es, source); !s.Whole {
			mask := make([]byte, source.Len)
			mask[len(mask)-1] = 0xff
			es = append(es, &expr.Bitwise{
				SourceRegister: reg1, DestRegister: reg1, Len: source.Len, Mask: mask, Xor: make([]byte, len(mask)),
			})
		}
		es = append(es, &expr.Lookup{
			SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: s.Map + nft.SideA,
		})
	}
	load, low, high := loadPorts(ports, reg2)
	n := nodeOf(append(nfnetlink.Marshal(nfnetlink.Inet, append(es, load...)...),
		nfnetlink.SourceNAT(nft.FamilyPolicy{IPv6: s.IPv6}.Family(), s.RandomFully, reg1, low, high))...)
	if s.To.IsValid() || s.Known {
		return n
	}
	return implying(s.IPv6, n)
}
