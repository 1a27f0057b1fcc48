package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"

	"nft-masq-agent/cmd/stress/knownbad"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const groupInstead = "against what a user would pick instead"

// insteadSizes are the numbers of CIDRs.
var insteadSizes = []int{10, 1000}

// instead measures the agent against its alternatives: a new connection, a change, and what reloads lose.
func (b *bench) instead(ctx context.Context) {
	for _, n := range insteadSizes {
		b.insteadConnections(ctx, n)
	}
	for _, n := range insteadSizes {
		b.insteadChange(ctx, n)
	}
	b.reloadsOfAgent(ctx)
	for _, a := range alternatives() {
		b.reloadsOf(ctx, a)
	}
	b.reloadsKnownBad(ctx)
}

// alternativesFor returns those that can have so many networks. Those without a list are measured once.
func alternativesFor(n int) []alternative {
	return slices.DeleteFunc(alternatives(), func(a alternative) bool { return !a.lists && n > insteadSizes[0] })
}

// insteadConnections measures a new connection, masqueraded, next to a list that does not contain its destination.
func (b *bench) insteadConnections(ctx context.Context, n int) {
	networks := reachable(n)
	dsts := destinations(networks, false)
	shuffle(networks)
	names := []string{"the agent"}
	all := []rules{ofNft(bareMasquerade), ofNft(ruleset(networks, nft.ModeNFTables).String())}
	for _, a := range alternativesFor(n) {
		names = append(names, a.name)
		all = append(all, func(ns *nfttest.NS) error { return a.replace(ns, networks) })
	}
	s := b.onNodes(ctx, 3, all, nil, dsts)
	for i, name := range names {
		r := newRow(groupInstead, n, "a new connection: "+name, "µs", s[i+1])
		b.add(r.against("bare masquerade", s[i+1], s[0]))
	}
}

// insteadChange measures a change of one CIDR among n: of the agent from the file to the kernel, of the others from
// the moment when they begin to write.
func (b *bench) insteadChange(ctx context.Context, n int) {
	f := nfttest.Must(openFollower(n, b.agent))
	defer func() { nfttest.Check(f.close()) }()
	contenders := []contender{f.firstChange()}
	for _, a := range alternativesFor(n) {
		other := nfttest.Must(openNode("alternative"))
		defer func() { nfttest.Check(other.close()) }()
		contenders = append(contenders, a.contender(other, n))
	}
	s := takeTurns(ctx, b.rounds, contenders...)
	for i, a := range alternativesFor(n) {
		r := newRow(groupInstead, n, "one CIDR changed, swap to kernel", "ms", s[0])
		b.add(r.against(a.name, s[0], s[i+1]))
	}
}

// contender replaces the rules of n networks by those of one more, and back.
func (a alternative) contender(n *node, size int) contender {
	lists := [2][]netip.Prefix{shuffled(size, false), shuffled(size, true)}
	turn := 0
	return contender{
		prepare: func() error {
			n.settle(size)
			turn = 1 - turn
			return nil
		},
		run: func() (time.Duration, error) {
			start := time.Now()
			err := a.replace(n.ns, lists[turn])
			return time.Since(start), err
		},
	}
}

// The destinations during reloads: one outside, and a pod of another node.
var (
	publicTarget = netip.MustParseAddr("198.51.100.1")
	podTarget    = netip.MustParseAddr("10.244.2.9")
)

// reloadLists returns ten networks with that of the pod, of which one changes.
func reloadLists() (lists [2][]netip.Prefix) {
	const others = 9
	pods := netip.PrefixFrom(podTarget, 24).Masked()
	for i, more := range []bool{false, true} {
		lists[i] = append(shuffled(others, more), pods)
	}
	return lists
}

// reloadsOfAgent changes the file of an agent.
func (b *bench) reloadsOfAgent(ctx context.Context) {
	top := nfttest.Must(nfttest.OpenTopology())
	defer func() { nfttest.Check(top.Close()) }()
	n := &node{ns: top.Node, conn: dialIn(top.Node)}
	defer func() { nfttest.Check(n.conn.Close()) }()
	lists := reloadLists()
	f := nfttest.Must(followerOn(n, len(lists[0]), b.agent, lists))
	defer func() { nfttest.Check(errors.Join(f.stop(), f.volume.Close())) }()
	nfttest.Check(f.start())
	b.reloads(ctx, top, "the agent", true, func(turn int) error {
		if err := f.volume.Write([]byte(f.texts[turn])); err != nil {
			return err
		}
		return f.node.await(f.hashes[turn], time.Millisecond)
	})
}

// reloadsOf has an alternative write its rules.
func (b *bench) reloadsOf(ctx context.Context, a alternative) {
	top := nfttest.Must(nfttest.OpenTopology())
	defer func() { nfttest.Check(top.Close()) }()
	lists := reloadLists()
	nfttest.Check(a.replace(top.Node, lists[0]))
	b.reloads(ctx, top, a.name, !a.everything, func(turn int) error { return a.replace(top.Node, lists[turn]) })
}

// reloadsKnownBad updates by a recipe that is wrong on every kernel: this must be seen.
func (b *bench) reloadsKnownBad(ctx context.Context) {
	top := nfttest.Must(nfttest.OpenTopology())
	defer func() { nfttest.Check(top.Close()) }()
	c := nfttest.Must(nftables.New(nftables.WithNetNSFd(top.Node.Fd()), nftables.AsLasting()))
	defer func() { nfttest.Check(c.CloseLasting()) }()
	lists, bad := reloadLists(), knownbad.Recipes()[0]
	t := nfttest.Must(bad.Install(c, lists[0]))
	wrong := b.reloads(ctx, top, bad.Name, true, func(turn int) error { return t.Update(lists[turn]) })
	if wrong == 0 {
		nfttest.Check(errors.New("no connection was wrong with a recipe that is known to be: this run proves nothing"))
	}
}

// Bounds of the reloads of one program.
const (
	maxReloads       = 10_000
	reloadTimeARound = 8 * time.Second
)

// reloads replaces the rules by those of the other list again and again while a pod opens connections, and counts those
// that the far end sees with a wrong source address. Without exemptions, that of the pod is always wrong.
func (b *bench) reloads(
	ctx context.Context, top *nfttest.Topology, name string, exempts bool, reload func(turn int) error,
) (wrong uint64) {
	masqueraded := func(a netip.Addr) bool { return a == publicTarget || !exempts }
	h := nfttest.Must(top.StartHammer(nfttest.Targets(masqueraded, publicTarget.String(), podTarget.String())...))
	defer func() { _, _ = h.Stop() }()
	nfttest.Check(h.Wait(ctx, 20))
	atRest := h.SoFar()
	if atRest.Leaked()+atRest.Wronged() > 0 {
		nfttest.Check(fmt.Errorf("%s: %s, before any reload", name, atRest))
	}
	times := 0
	end := time.Now().Add(time.Duration(b.rounds) * reloadTimeARound)
	for times < maxReloads && time.Now().Before(end) {
		nfttest.Check(ctx.Err())
		times++
		nfttest.Check(reload(times % 2))
	}
	nfttest.Check(h.Wait(ctx, 1))
	tally := nfttest.Must(h.Stop())
	if tally.Dropped > 0 {
		nfttest.Check(fmt.Errorf("%s: conntrack dropped %d packets, so this proves nothing", name, tally.Dropped))
	}
	wrong = tally.Leaked() + tally.Wronged()
	what := fmt.Sprintf("wrong of %s connections, %s reloads: %s", grouped(int(tally.Seen())), grouped(times), name)
	b.add(newRow(groupInstead, insteadSizes[0], what, "", series{float64(wrong)}))
	return wrong
}
