package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

const (
	groupMemory = "memory of the process"
	groupRest   = "at rest"
)

// memory measures the peak memory of a start with n CIDRs and a change of one,
// and the memory some seconds later.
func (b *bench) memory(ctx context.Context) {
	for _, n := range append([]int{defaultSize}, b.sizes...) {
		var peaks, rests series
		for range b.rounds {
			peak, now := b.memoryOnce(ctx, n)
			peaks, rests = append(peaks, peak), append(rests, now)
		}
		b.add(bounded(newRow(groupMemory, n, "peak", "MB", peaks), map[int]float64{defaultSize: 16}))
		b.add(bounded(newRow(groupMemory, n, "at rest", "MB", rests), map[int]float64{targetLarge: 48}))
	}
}

func (b *bench) memoryOnce(ctx context.Context, n int) (peak, now float64) {
	f := nfttest.Must(b.follow(n))
	defer func() { nfttest.Check(f.close()) }()
	nfttest.Must(f.contender().turn(ctx))
	time.Sleep(2 * time.Second) // to come to rest
	p, r, err := f.agent.Memory()
	nfttest.Check(err)
	return float64(p) / 1e6, float64(r) / 1e6
}

// A rester is an agent that is observed while its file does not change.
type rester struct {
	*follower
	surroundings
	commits uint32
}

// surroundings are the conditions of an agent at rest.
type surroundings struct {
	what        string
	bound       float64 // of the CPU time, in percent
	foreign     int     // how often a second another program writes
	connections int     // that are tracked
}

func allSurroundings() []surroundings {
	return []surroundings{
		{what: "alone", bound: 0.25},
		{what: "next to 100 foreign commits a second", bound: 1, foreign: 100},
		{what: "with 10,000 connections", bound: 0.25 + 0.15, connections: 10_000}, // 0.15 for the evidence
	}
}

// atRest observes agents, each on a separate node, at the same time: alone, next to a program that commits to its
// own table, and with connections. The minute has one reading of evidence.
func (b *bench) atRest(ctx context.Context) {
	var all []*rester
	for _, n := range []int{defaultSize, slices.Max(b.sizes)} {
		for _, s := range allSurroundings() {
			f := nfttest.Must(b.follow(n))
			defer func() { nfttest.Check(f.close()) }()
			nfttest.Check(track(f.node.ns, s.connections))
			all = append(all, &rester{follower: f, surroundings: s})
		}
	}
	b.observe(ctx, all)
}

// rest is how long agents are watched.
const rest = time.Minute

// observe observes agents at the same time.
func (b *bench) observe(ctx context.Context, all []*rester) {
	time.Sleep(time.Second) // for the rest of the start
	watched := make([]func() (share, writes float64, err error), len(all))
	for i, r := range all {
		watched[i] = nfttest.Must(r.watch(ctx))
	}
	select {
	case <-ctx.Done():
		nfttest.Check(ctx.Err())
	case <-time.After(rest):
	}
	for i, r := range all {
		share, writes, err := watched[i]()
		nfttest.Check(err)
		b.addRest(r, share, writes)
	}
}

func (b *bench) addRest(r *rester, share, writes float64) {
	processor := newRow(groupRest, r.size, "CPU, "+r.what, "%", series{share})
	written := newRow(groupRest, r.size, fmt.Sprintf("writes in %s, %s", rest, r.what), "", series{writes})
	if r.size == defaultSize {
		processor, written = processor.target(r.bound), written.target(0)
	}
	b.add(processor)
	b.add(written)
}

// watch starts to observe. The returned function stops it and returns the CPU
// share, and the number of transactions that were not the other program's.
func (r *rester) watch(ctx context.Context) (end func() (share, writes float64, err error), err error) {
	generation, err := r.node.conn.Generation()
	if err != nil {
		return nil, err
	}
	before, err := r.agent.ProcessorTime()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	stop := func() error { return nil }
	if r.foreign > 0 {
		stop = r.writeForeign(ctx)
	}
	return func() (share, writes float64, err error) {
		if err := stop(); err != nil {
			return 0, 0, err
		}
		after, err := r.agent.ProcessorTime()
		if err != nil {
			return 0, 0, err
		}
		share = (after - before).Seconds() / time.Since(start).Seconds()
		now, err := r.node.conn.Generation()
		return share, float64(now - generation - r.commits), err
	}, nil
}

// writeForeign commits to another table until it is stopped.
func (r *rester) writeForeign(ctx context.Context) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		c := dialIn(r.node.ns)
		defer func() { _ = c.Close() }()
		tick := time.NewTicker(time.Second / time.Duration(r.foreign))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				ended <- nil
				return
			case <-tick.C:
			}
			if err := r.writeOnce(c); err != nil {
				ended <- err
				return
			}
		}
	}()
	return func() error {
		cancel()
		return <-ended
	}
}

func (r *rester) writeOnce(c *nfnetlink.Conn) error {
	const name = "someone-else"
	var batch nfnetlink.Batch
	if r.commits%2 == 0 {
		batch.AddTable(nfnetlink.Inet, name)
	} else {
		batch.DelTable(nfnetlink.Inet, name)
	}
	if err := c.Commit(&batch); err != nil {
		return err
	}
	r.commits++
	return nil
}
