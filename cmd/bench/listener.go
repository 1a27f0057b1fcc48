package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

const groupListener = "what the agent costs other programs"

// others measures another program's transactions with and without the agent, in
// time and in kernel memory.
func (b *bench) others(ctx context.Context) {
	for _, n := range b.sizes {
		b.neighbourOf(ctx, n, "a set of CIDRs", func(ns *nfttest.NS) (transaction, error) { return fillOf(ns, n) })
	}
	const services = 1000
	b.neighbourOf(ctx, services, "rules of so many Services",
		func(*nfttest.NS) (transaction, error) { return kubeProxyLike(services) })
}

// A transaction is a transaction of another program; release frees its resources.
type transaction struct {
	send    func(*node) (time.Duration, error)
	release func() error
}

// fillOf fills a set, with messages encoded beforehand.
func fillOf(ns *nfttest.NS, n int) (transaction, error) {
	msgs, err := record(ruleset(shuffled(n, false), nft.ModeNFTables))
	if err != nil {
		return transaction{}, err
	}
	w, err := newFloor(ns, msgs)
	if err != nil {
		return transaction{}, err
	}
	return transaction{func(*node) (time.Duration, error) { return w.send() }, w.close}, w.rename(otherTable)
}

// kubeProxyLike makes nft load what kube-proxy in mode nftables creates for that many Services.
func kubeProxyLike(services int) (transaction, error) {
	f, err := os.CreateTemp("", "bench-services-")
	if err != nil {
		return transaction{}, err
	}
	_, err = f.WriteString(kubeProxyText(services))
	send := func(n *node) (time.Duration, error) { return runProgram(n.ns, nil, "nft", "-f", f.Name()) }
	return transaction{send, func() error { return errors.Join(f.Close(), os.Remove(f.Name())) }}, err
}

// The states of the agent in which another program writes.
const (
	alone = iota // it is stopped
	nextTo
	states
)

// A cost is what transactions took in each state, with one value for each run of an agent.
type cost [states]struct{ seconds, megabytes series }

func (b *bench) neighbourOf(ctx context.Context, n int, what string,
	open func(*nfttest.NS) (transaction, error),
) {
	f := nfttest.Must(openFollower(defaultSize, b.agent))
	defer func() { nfttest.Check(f.close()) }()
	t := nfttest.Must(open(f.node.ns))
	defer func() { nfttest.Check(t.release()) }()
	var c, control cost
	for range b.rounds {
		c.withAgent(ctx, f, n, t, &control)
	}
	b.addCost(n, what, c, control)
}

// withAgent measures one run of an agent. Repetitions count with their median;
// the control is measured like [nextTo], but without the agent.
func (c *cost) withAgent(ctx context.Context, f *follower, n int, t transaction, control *cost) {
	nfttest.Check(f.start())
	defer func() { nfttest.Check(f.stop()) }()
	const repeats = 5
	var life, again cost
	for i := range repeats {
		nfttest.Check(ctx.Err())
		steps := []func() error{
			func() error { return f.whileStopped(func() error { return life.measure(alone, f, n, t) }) },
			func() error { return life.measure(nextTo, f, n, t) },
			func() error { return f.whileStopped(func() error { return again.measure(alone, f, n, t) }) },
		}
		for j := range steps { // the order changes each time
			nfttest.Check(steps[(i+j)%len(steps)]())
		}
	}
	c.add(life)
	control.add(again)
}

// whileStopped measures while the agent's process does not run.
func (f *follower) whileStopped(measure func() error) error {
	if err := f.agent.Signal(unix.SIGSTOP); err != nil {
		return err
	}
	return errors.Join(measure(), f.agent.Signal(unix.SIGCONT))
}

// add takes the median of each state.
func (c *cost) add(life cost) {
	for state, l := range life {
		if len(l.seconds) > 0 {
			c[state].seconds = append(c[state].seconds, l.seconds.quantile(0.5))
			c[state].megabytes = append(c[state].megabytes, l.megabytes.quantile(0.5))
		}
	}
}

func (c *cost) measure(state int, f *follower, size int, t transaction) error {
	n := f.node
	err := n.clear(otherTable, size)
	if f.agent != nil {
		err = errors.Join(err, settle(f.agent))
	}
	if err != nil {
		return err
	}
	used := watchMemory()
	took, err := t.send(n)
	c[state].seconds = append(c[state].seconds, took.Seconds())
	c[state].megabytes = append(c[state].megabytes, used())
	return errors.Join(err, n.clear(otherTable, size))
}

// settle waits until the agent has handled another program's earlier writes:
// until it uses no more CPU than at rest.
func settle(a *agent.Agent) error {
	const (
		while  = 300 * time.Millisecond // in which a polling agent polls at least once
		atRest = 3 * time.Millisecond
		tries  = 100
	)
	before, err := a.ProcessorTime()
	for range tries {
		if err != nil {
			return err
		}
		time.Sleep(while)
		var now time.Duration
		if now, err = a.ProcessorTime(); err == nil && now-before < atRest {
			return nil
		}
		before = now
	}
	return fmt.Errorf("the agent was not at rest in %s", tries*while)
}

// memoryFrom is the size from which on a transaction's memory is distinguishable
// from the rest of the machine.
const memoryFrom = 10_000

func (b *bench) addCost(n int, what string, c, control cost) {
	const timeBound, memoryBound = 1.05, 1.1
	add := func(name string, with cost, state int) {
		r := newRow(groupListener, n, what+", "+name, "ms", with[state].seconds).
			against("without the agent", with[state].seconds, c[alone].seconds)
		m := newRow(groupListener, n, what+", "+name+", memory", "MB", with[state].megabytes).
			against("without the agent", with[state].megabytes, c[alone].megabytes)
		if state == nextTo {
			r, m = r.targetOfMedian(timeBound), m.targetOfMedian(memoryBound)
		}
		b.add(r)
		if n >= memoryFrom {
			b.add(m)
		}
	}
	add("without the agent, again", control, alone)
	add("with the agent", c, nextTo)
}

// watchMemory starts to watch how much memory is available on the machine. The
// returned function stops it and returns the largest drop, in MB.
func watchMemory() (drop func() float64) {
	before := memAvailable()
	stop, low := make(chan struct{}), make(chan float64)
	go func() {
		least := before
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			least = min(least, memAvailable())
			select {
			case <-stop:
				low <- min(least, memAvailable())
				return
			case <-tick.C:
			}
		}
	}()
	return func() float64 {
		close(stop)
		return before - <-low
	}
}

// memAvailable reads MemAvailable of proc_meminfo(5), in MB.
func memAvailable() float64 {
	text, _ := os.ReadFile("/proc/meminfo")
	_, after, _ := bytes.Cut(text, []byte("MemAvailable:"))
	kB, _ := strconv.ParseFloat(string(bytes.Fields(after)[0]), 64)
	return kB * 1024 / 1e6
}

// heal deletes the agent's table and waits until its rules are effective again.
func (f *follower) heal(c *nfnetlink.Conn) (time.Duration, error) {
	var attack nfnetlink.Batch
	attack.DelTable(nfnetlink.Inet, nft.TableName)
	if err := c.Commit(&attack); err != nil {
		return 0, fmt.Errorf("delete the agent's table: %w", err)
	}
	start := time.Now()
	err := f.node.await(f.hashes[f.turn], 100*time.Microsecond)
	return time.Since(start), err
}
