package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const groupTrace = "what explain --trace costs"

// A tracer is explain --trace while it waits for a packet.
type tracer struct {
	process *nfttest.Process
	cmd     *exec.Cmd
}

// trace starts a trace, and returns when packets are traced.
func (b *bench) trace(ns *nfttest.NS, destination netip.Addr) (*tracer, error) {
	cmd := nfttest.Command(b.agent, "explain", destination.String(), "--trace", "10m")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	process, err := ns.Start(cmd)
	if err != nil {
		return nil, err
	}
	if _, err := bufio.NewReader(stderr).ReadString('\n'); err != nil {
		return nil, errors.Join(err, process.Wait())
	}
	return &tracer{process, cmd}, nil
}

// stop ends a trace to which no packet came.
func (t *tracer) stop() error {
	err := t.cmd.Process.Signal(unix.SIGINT)
	_ = t.process.Wait() // its exit code says that no packet came
	return err
}

// traced measures what a trace costs another program's transaction, connections that it does not select, and the
// packet that it shows.
func (b *bench) traced(ctx context.Context) {
	b.tracedTransaction(ctx, slices.Max(b.sizes))
	networks := reachable(targetSmall)
	dsts := destinations(networks, false)
	p := nfttest.Must(openPath(ofNft(ruleset(networks, nft.ModeNFTables).String())))
	defer func() { nfttest.Check(p.close()) }()
	others := p.contender(dsts[1:])
	with, without := b.nextToTrace(ctx, p.top.Node, dsts[0], 3, others)
	r := newRow(groupTrace, targetSmall, "a new connection to another destination", "µs", with)
	b.add(r.against("without a trace", with, without))
	with, without = b.firstPackets(ctx, p, dsts[0])
	r = newRow(groupTrace, targetSmall, "the traced packet", "µs", with)
	b.add(r.against("without a trace", with, without))
}

// tracedTransaction measures another program's transaction of n elements.
func (b *bench) tracedTransaction(ctx context.Context, n int) {
	node := nfttest.Must(openNode("bench-trace"))
	defer func() { nfttest.Check(node.close()) }()
	t := nfttest.Must(fillOf(node.ns, n))
	defer func() { nfttest.Check(t.release()) }()
	fill := contender{
		prepare: func() error { return node.clear(otherTable, n) },
		run:     func() (time.Duration, error) { return t.send(node) },
	}
	with, without := b.nextToTrace(ctx, node.ns, netip.MustParseAddr("203.0.113.9"), 1, fill)
	r := newRow(groupTrace, n, "another program's set of CIDRs", "ms", with)
	b.add(r.against("without a trace", with, without).targetOfMedian(1.05))
}

// nextToTrace measures a contender next to a trace of packets to a destination, and without, in turns.
func (b *bench) nextToTrace(
	ctx context.Context, ns *nfttest.NS, destination netip.Addr, times int, c contender,
) (with, without series) {
	var t *tracer
	traced := contender{prepare: func() (err error) {
		t, err = b.trace(ns, destination) // and then there is time to come to rest
		return errors.Join(err, c.prepare())
	}, run: func() (time.Duration, error) {
		took, err := c.run()
		return took, errors.Join(err, t.stop())
	}}
	s := takeTurns(ctx, times*b.rounds, traced, c)
	return s[0], s[1]
}

// firstPackets measures the first packet of a connection to a destination, with a trace that shows it and without.
func (b *bench) firstPackets(ctx context.Context, p *path, destination netip.Addr) (with, without series) {
	const times = 10 // one packet takes so little time that the machine's noise decides
	to := unix.SockaddrInet4{Addr: destination.As4(), Port: 53}
	one := contender{run: func() (took time.Duration, err error) {
		p.port++
		err = p.top.Pod.Do(func() error {
			took, err = timeTurn(p.port, func(fd int) error { return unix.Sendto(fd, nil, 0, &to) })
			return err
		})
		return took, err
	}}
	traced := contender{run: func() (time.Duration, error) {
		t, err := b.trace(p.top.Node, destination)
		if err != nil {
			return 0, err
		}
		took, err := one.run()
		if shown := t.process.Wait(); shown != nil {
			err = errors.Join(err, fmt.Errorf("explain --trace: %w", shown))
		}
		return took, err
	}}
	s := takeTurns(ctx, times*b.rounds, traced, one)
	return s[0], s[1]
}
