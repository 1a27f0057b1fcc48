package main

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// The addresses that connections leave from. They are on the loopback device: on eth0
// IPv6 would choose them for masquerading, too.
var floating = []string{
	"198.51.100.211", "198.51.100.212", "198.51.100.213", "198.51.100.214",
	"2001:db8:5::2", "2001:db8:5::3", "2001:db8:5::4", "2001:db8:5::5",
}

const snatKey = `snatAddresses: [198.51.100.208/29, "2001:db8:5::/64"]`

// addressesMove assigns addresses to the node and removes them. Once the agent has
// followed, a pod's connections leave from the address that is its own, and from no
// other.
func addressesMove(keys ...string) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) { b.moveAddresses(ctx, keys) }
}

func (b *bench) moveAddresses(ctx context.Context, keys []string) {
	a, p := b.inService(ctx, nft.ModeNFTables, 4, keys...)
	want := p[0].ruleset[nft.ModeNFTables]
	var has []string // which is what the hammer expects at first
	for b.more(ctx) {
		b.updates++
		moving := floating[rand.IntN(len(floating))]
		at, before := slices.Index(has, moving), a.Count("snat_addresses_changed")
		after := slices.DeleteFunc(slices.Clone(has), func(a string) bool { return a == moving })
		if at < 0 {
			after = append(after, moving)
		}
		// Until the agent has followed, connections leave from the addresses of before.
		b.hammer.LeavesFrom(append(b.sources(want, has), b.sources(want, after)...)...)
		b.whileAway(ctx, func() {
			b.float(moving, at < 0)
			followed := func() bool { return a.Count("snat_addresses_changed") > before }
			nfttest.Check(a.Until(ctx, "the addresses of the node", followed))
		})
		has = after
		b.settle(ctx, want, has)
	}
}

// fixedChanges is fileChanges on a node with fixed source addresses.
func fixedChanges(ctx context.Context, b *bench) {
	p := policies(4, snatKey)
	b.floatAll()
	b.from = b.sources(p[0].ruleset[nft.ModeNFTables], floating)
	fileChanges(nft.ModeNFTables, 4, snatKey)(ctx, b)
}

// settle expects connections only from the addresses that are right now.
func (b *bench) settle(ctx context.Context, want nft.Ruleset, has []string) {
	b.hammer.LeavesFrom(b.sources(want, has)...)
	b.inSync(ctx, want.WithAddresses(cases.Addrs(has...)))
	b.flows(ctx, 20)
}

// sources returns the addresses from which the pod's connections leave.
func (b *bench) sources(want nft.Ruleset, has []string) []netip.Addr {
	p := want.WithAddresses(cases.Addrs(has...)).Policy
	from := []netip.Addr{b.top.NodeV4, b.top.NodeV6}
	for i, pod := range []netip.Addr{b.top.PodV4, b.top.PodV6} {
		dst := netip.MustParseAddr(masqueraded[i])
		named, _ := judge.SourceAddress(p, nft.Connection{Src: pod, Dst: dst, OutInterface: "eth0"})
		if named.IsValid() {
			from[i] = named
		}
	}
	return from
}

// floatAll assigns all of the addresses to the node.
func (b *bench) floatAll() {
	for _, a := range floating {
		b.float(a, true)
	}
}

// float assigns an address to the node, or removes it.
func (b *bench) float(a string, here bool) {
	addr := netip.MustParseAddr(a)
	prefix := netip.PrefixFrom(addr, addr.BitLen())
	if here {
		nfttest.Check(b.top.Node.AddAddr("lo", prefix))
	} else {
		nfttest.Must(b.top.Node.Output("", "ip", "address", "del", prefix.String(), "dev", "lo"))
	}
}

// onTheLink is an address that the far end resolves by ARP.
const onTheLink = "192.0.2.211"

// changedByHand is known to be wrong: an address is taken from the node before the rules
// change, by hand and so some connections later. Meanwhile answers go nowhere. It
// returns how many TCP connections were lost.
func changedByHand(ctx context.Context, b *bench) (lost uint64) {
	c, problems := config.Parse(config.Defaults{},
		config.Source{Name: "stress", Data: []byte("snatAddresses: [" + onTheLink + "]\n")})
	nfttest.Check(problems.Err())
	without := nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true})
	with := without.WithAddresses(cases.Addrs(onTheLink))
	apply := func(r nft.Ruleset) { nfttest.Must(b.kernel.Apply(ctx, r, nft.Contents)) }
	b.float(onTheLink, true)
	apply(with)
	target := nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr(masqueraded[0]), Masqueraded: true}
	from := []netip.Addr{b.top.NodeV4, netip.MustParseAddr(onTheLink)}
	b.hammer = nfttest.Must(b.top.StartHammerFrom(from, target))
	b.flows(ctx, 20)
	missing := func() uint64 {
		t := b.hammer.SoFar()
		return t.Sent() - min(t.Seen(), t.Sent())
	}
	for b.more(ctx) || lost == 0 && ctx.Err() == nil {
		b.updates++
		before := missing()
		b.float(onTheLink, false)
		// The far end asks again who has it.
		nfttest.Must(b.top.Outside.Output("", "ip", "neighbour", "flush", "dev", "eth0", "to", onTheLink))
		nfttest.Check(b.hammer.Sent(ctx, 2))
		apply(without)
		b.flows(ctx, 5)
		lost += missing() - min(before, missing())
		b.float(onTheLink, true)
		apply(with)
		b.flows(ctx, 5)
	}
	return lost
}

// byHand runs what is known to be wrong with addresses.
func (r *report) byHand(ctx context.Context, s settings) {
	const name = "the address goes before the rules are changed by hand"
	if !s.only.MatchString(name) || ctx.Err() != nil {
		return
	}
	var lost uint64
	b, tally, err := r.bench(ctx, s, func(ctx context.Context, b *bench) { lost = changedByHand(ctx, b) })
	if err != nil {
		r.fail("%s: %v", name, err)
		return
	}
	r.printf("%-60s %8d %9d %6d LOST", name, b.updates, tally.Seen(), lost)
	if lost == 0 {
		r.fail("%s: no connection was lost: this run proves nothing", name)
	}
}
