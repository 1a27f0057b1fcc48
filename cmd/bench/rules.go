package main

import (
	"context"
	"fmt"
	"net/netip"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

const groupRules = "one new connection through the node, with snatRules"

// ruleBounds are the most that a connection may cost, by the number of entries, against one
// entry.
var ruleBounds = map[int]float64{16: 1.25, 64: 2}

// A ruleKind is how entries of snatRules are written: those of which none matches, and the
// last one, which does.
type ruleKind struct {
	name      string
	addresses int // of each entry
	other     func(i int) config.SNATRule
	last      config.SNATRule
}

func ruleKinds() []ruleKind {
	cidr := func(format string, args ...any) []config.CIDR {
		return []config.CIDR{{Prefix: netip.MustParsePrefix(fmt.Sprintf(format, args...))}}
	}
	pod, out := cidr("10.244.1.0/24"), []config.Interface{{Name: "eth0"}}
	from := func(i int) config.SNATRule { return config.SNATRule{From: cidr("20.0.%d.0/24", i)} }
	to := func(i int) config.SNATRule { return config.SNATRule{To: cidr("21.0.%d.0/24", i)} }
	return []ruleKind{
		{"by source", 1, from, config.SNATRule{From: pod}},
		{"by source, 4 addresses each", 4, from, config.SNATRule{From: pod}},
		{"by destination", 1, to, config.SNATRule{To: cidr("%s", benchmarks)}},
		{"by source, destination, interface and two of them", 1, func(i int) config.SNATRule {
			return []config.SNATRule{
				from(i), to(i), {From: pod, To: to(i).To}, {From: from(i).From, Out: out},
			}[i%4]
		}, config.SNATRule{From: pod, To: cidr("%s", benchmarks), Out: out}},
	}
}

// ruleset returns the ruleset with n entries, on a node that has the addresses.
func (k ruleKind) ruleset(networks []netip.Prefix, n int, addresses []netip.Addr) nft.Ruleset {
	c := listConfig(networks)
	for i := range n {
		r := k.last
		if i < n-1 {
			r = k.other(i)
		}
		r.Addresses = []config.CIDR{{Prefix: netip.PrefixFrom(firstSource, 24).Masked()}}
		c.SNATRules = append(c.SNATRules, r)
	}
	plain := ruleset(networks, nft.ModeNFTables)
	return nft.Compile(c, nft.Options{Layout: plain.Layout, RandomFully: true}).WithAddresses(addresses[:k.addresses])
}

// rules measures what many entries of snatRules add to one of their kind. The last one matches.
func (b *bench) rules(ctx context.Context) {
	networks := reachable(targetSmall)
	dsts, addresses, counts := destinations(networks, false), sources(4), []int{1, 16, 64}
	var all []rules
	for _, k := range ruleKinds() {
		for _, n := range counts {
			all = append(all, ofNft(k.ruleset(networks, n, addresses).String()))
		}
	}
	s := b.onNodes(ctx, 5, all, addresses, dsts)
	for i, k := range ruleKinds() {
		one := s[i*len(counts)]
		for j, n := range counts[1:] {
			many := s[i*len(counts)+1+j]
			r := newRow(groupRules, targetSmall, fmt.Sprintf("%d entries %s", n, k.name), "µs", many)
			r = r.against("1 entry", many, one)
			b.add(bounded(r, map[int]float64{targetSmall: ruleBounds[n]}))
		}
	}
}

// sources returns addresses that connections can leave from.
func sources(n int) (addresses []netip.Addr) {
	for i := range n {
		addresses = append(addresses, addr(number(firstSource)+uint32(i)))
	}
	return addresses
}
