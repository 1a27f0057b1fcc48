package main

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

const (
	groupChange = "one CIDR changed, file swap to kernel"
	groupSwap   = "file swap to kernel"
)

// A follower is an agent that follows a file, of which two contents alternate: n networks, and
// one more unless others are given.
type follower struct {
	size   int
	binary string
	node   *node
	agent  *agent.Agent
	volume *agent.Volume
	texts  [2]string
	hashes [2]string
	turn   int // index of the text that is in the kernel
	every  time.Duration
	swap   func() error
}

// openFollower returns a follower of files with some more keys.
func openFollower(n int, binary string, keys ...string) (f *follower, err error) {
	return followerOf(n, binary, [2][]netip.Prefix{shuffled(n, false), shuffled(n, true)}, keys...)
}

// follow returns a follower that has started.
func (b *bench) follow(n int) (*follower, error) {
	f, err := openFollower(n, b.agent)
	if err != nil {
		return nil, err
	}
	if err := f.start(); err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// followerOf returns a follower of files with two lists.
func followerOf(n int, binary string, lists [2][]netip.Prefix, keys ...string) (*follower, error) {
	own, err := openNode("node")
	if err != nil {
		return nil, err
	}
	return followerOn(own, n, binary, lists, keys...)
}

// followerOn returns a follower of files with two lists, on a node.
func followerOn(on *node, n int, binary string, lists [2][]netip.Prefix, keys ...string) (f *follower, err error) {
	f = &follower{size: n, binary: binary, node: on, every: 50 * time.Microsecond}
	if n >= 10_000 {
		f.every = time.Millisecond // to leave the CPUs idle
	}
	for i, networks := range lists {
		f.texts[i], f.hashes[i] = text(networks), ruleset(networks, nft.ModeNFTables).Hash()
		if more := strings.Join(keys, ""); more != "" {
			f.texts[i] += more
			f.hashes[i] = keyed(networks, more).Hash()
		}
	}
	f.volume, err = newVolume(f.texts[0])
	return f, err
}

// start starts the agent, on a node without rules.
func (f *follower) start() (err error) {
	if err := f.node.clear(nft.TableName, f.size); err != nil {
		return err
	}
	f.turn = 0
	swap, err := f.volume.Prepare([]byte(f.texts[f.turn]))
	if err != nil {
		return err
	}
	if err := swap(); err != nil {
		return err
	}
	f.agent, err = startAgent(f.node, f.binary, f.volume)
	return err
}

func (f *follower) stop() (err error) {
	if f.agent != nil {
		err = f.agent.Stop()
		f.agent = nil
	}
	return err
}

func (f *follower) close() error {
	return errors.Join(f.stop(), f.node.close(), f.volume.Close())
}

// firstChange is the contender with an agent that runs only for its turns: a
// listener, in any namespace, slows down the kernel.
func (f *follower) firstChange() contender {
	c := f.contender()
	return contender{
		prepare: func() error {
			if err := f.start(); err != nil {
				return err
			}
			return c.prepare()
		},
		run: func() (time.Duration, error) {
			took, err := c.run()
			return took, errors.Join(err, f.stop())
		},
	}
}

// contender swaps the file and waits until it is effective in the kernel.
func (f *follower) contender() contender {
	return contender{
		prepare: func() (err error) {
			f.node.settle(f.size)
			f.turn = 1 - f.turn
			f.swap, err = f.volume.Prepare([]byte(f.texts[f.turn]))
			return err
		},
		run: func() (time.Duration, error) {
			start := time.Now()
			if err := f.swap(); err != nil {
				return 0, err
			}
			err := f.node.await(f.hashes[f.turn], f.every)
			return time.Since(start), err
		},
	}
}

// change measures a change of one CIDR among n, compared with a full apply and
// with the kernel's floor for refilling the sets.
func (b *bench) change(ctx context.Context) {
	for _, n := range b.sizes {
		b.changeN(ctx, n)
	}
}

func (b *bench) changeN(ctx context.Context, n int) {
	f := nfttest.Must(openFollower(n, b.agent))
	defer func() { nfttest.Check(f.close()) }()
	a := nfttest.Must(openApply(n))
	defer func() { nfttest.Check(a.close()) }()
	s := takeTurns(ctx, b.rounds, f.firstChange(), a.fromRuleset(), a.kernelAlone())
	r := newRow(groupChange, n, "swap to kernel", "ms", s[0])
	b.add(r.against("full apply, from a ruleset", s[0], s[1]))
	b.add(bounded(r.against("kernel's floor", s[0], s[2]), map[int]float64{targetLarge: 2}))
}

// swaps is how many are measured.
const swaps = 300

// swap measures the time from a file swap to the kernel with the default config.
func (b *bench) swap(ctx context.Context) {
	f := nfttest.Must(b.follow(defaultSize))
	defer func() { nfttest.Check(f.close()) }()
	c := f.contender()
	prepare := c.prepare
	c.prepare = func() error {
		// The agent checks the file for at most 0.5 % of the time.
		time.Sleep(100 * time.Millisecond)
		return prepare()
	}
	s := takeTurns(ctx, swaps, c)
	b.addQuantiles(groupSwap, "default config, ", s[0], 10)
}
