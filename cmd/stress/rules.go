package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// randomRules returns snatRules with n entries, most of them for other pods.
func randomRules(n int) string {
	var entries []string
	for i := range n {
		match := []string{
			fmt.Sprintf("from: [%q, %q]", filler(2, 2*i), filler(2, 2*i+1)), // other pods
			`from: [10.244.0.0/16, "fd00:10:244::/48"]`,
			`from: [10.0.0.0/8, "fd00::/8"]`, // more than that
			`to: [198.51.100.0/28, "2001:db8:1::/64"]`,
			`to: [203.0.113.0/24, "2001:db8:7::/64"]`, // elsewhere
			`out: ["eth*"]`,
			`out: [wg0]`,
			`from: [10.244.0.0/16, "fd00:10:244::/48"], to: [198.51.100.0/28, "2001:db8:1::/64"], out: [eth0]`,
		}
		which, several := rand.IntN(len(match)), rand.IntN(2)
		if i >= 8 {
			which = 0
		}
		entries = append(entries, fmt.Sprintf("{%s, addresses: [%s]}", match[which], someAddresses(1+several)))
	}
	rand.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
	return "snatRules: [" + strings.Join(entries, ", ") + "]"
}

// someAddresses returns n addresses of each family, or some that the node never has.
func someAddresses(n int) string {
	if rand.IntN(6) == 0 {
		return `198.51.100.77, "2001:db8:5:77::1"`
	}
	var all []string
	half := len(floating) / 2
	for _, family := range [][]string{floating[:half], floating[half:]} {
		for _, i := range rand.Perm(half)[:n] {
			all = append(all, fmt.Sprintf("%q", family[i]))
		}
	}
	return strings.Join(all, ", ")
}

// rulesChange changes entries of snatRules, their addresses and their order, and
// snatAddresses, together with the list. Meanwhile a connection leaves from the address
// that the old policy or the new one chooses, then only from that of the new one.
func rulesChange(n int) func(context.Context, *bench) {
	next := func(i int) policy {
		keys := []string{randomRules(n)}
		if rand.IntN(2) == 0 {
			keys = append(keys, "snatAddresses: ["+someAddresses(1+rand.IntN(2))+"]")
		}
		return policies(4, keys...)[i%2]
	}
	return func(ctx context.Context, b *bench) {
		b.floatAll()
		before := next(0)
		b.from = b.sources(before.ruleset[nft.ModeNFTables], floating)
		a := b.serve(ctx, nft.ModeNFTables, [2]policy{before})
		for b.more(ctx) {
			b.updates++
			after := next(b.updates)
			old, want := before.ruleset[nft.ModeNFTables], after.ruleset[nft.ModeNFTables]
			b.hammer.LeavesFrom(slices.Concat(b.sources(old, floating), b.sources(want, floating))...)
			b.change(ctx, a, nft.ModeNFTables, after)
			b.flows(ctx, 1) // those of before are counted
			b.settle(ctx, want, floating)
			before = after
		}
	}
}

// rulesAlternate changes between two lists of entries as fast as transactions go, without
// an agent. Connections leave from the addresses of either, and from no other: a map that
// a packet finds without its element would let the next rule masquerade. With several
// addresses in an entry, the pod chooses in another kind of map.
func rulesAlternate(several bool) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) { b.alternate(ctx, several) }
}

func (b *bench) alternate(ctx context.Context, several bool) {
	var rulesets [2]nft.Ruleset
	b.from = nil // not the addresses of the interfaces
	for i := range rulesets {
		of := func(v4, v6 string) string { return fmt.Sprintf("[%s, %q]", v4, v6) }
		if several {
			of = func(v4, v6 string) string { return fmt.Sprintf("[%s, %s, %q, %q]", v4, floating[2], v6, floating[6]) }
		}
		p := policies(4, fmt.Sprintf(
			`snatRules: [{from: [20.%d.0.0/16], addresses: %s}, {from: [10.0.0.0/8, "fd00::/8"], addresses: %s}]`,
			i, of(floating[3], floating[7]), of(floating[i], floating[4+i])))
		rulesets[i] = p[i].ruleset[nft.ModeNFTables]
		b.from = append(b.from, b.sources(rulesets[i], floating)...)
	}
	b.floatAll()
	nfttest.Must(b.kernel.Apply(ctx, rulesets[0], nft.Contents))
	b.hammerIt(ctx)
	for b.more(ctx) {
		b.updates++
		nfttest.Must(b.kernel.Apply(ctx, rulesets[b.updates%2], nft.Contents))
	}
}
