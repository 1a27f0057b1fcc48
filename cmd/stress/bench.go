package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/cmd/stress/knownbad"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// A bench is a node with connections through it.
type bench struct {
	binary string
	config string // the agent's file
	top    *nfttest.Topology
	kernel *kernel.Kernel // for checks and cleanup
	hammer *nfttest.Hammer
	from   []netip.Addr // that connections of the node leave from
	agents []*agent.Agent
	until  time.Time

	updates int
	away    nfttest.Tally // what was wrong while the rules were missing
	note    string        // what else was counted
}

// openBench creates a node without rules, and without connections through it.
func openBench(binary string) (*bench, error) {
	binary, err := filepath.Abs(binary)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(binary); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	b := &bench{binary: binary}
	dir, err := os.MkdirTemp("", "stress-")
	if err != nil {
		return nil, err
	}
	b.config = filepath.Join(dir, "ip-masq-agent")
	if b.top, err = nfttest.OpenTopology(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	b.from = []netip.Addr{b.top.NodeV4, b.top.NodeV6}
	b.kernel = kernel.New(nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(b.top.Node) }))
	return b, nil
}

func (b *bench) close() error {
	var errs []error
	if b.hammer != nil {
		_, err := b.hammer.Stop()
		errs = append(errs, err)
	}
	for _, a := range b.agents {
		_ = a.Kill() // most have ended
		<-a.Done()
	}
	return errors.Join(append(errs, b.kernel.Close(), b.top.Close(), os.RemoveAll(filepath.Dir(b.config)))...)
}

// hammerIt opens connections from now on.
func (b *bench) hammerIt(ctx context.Context) {
	b.hammer = nfttest.Must(b.top.StartHammerFrom(b.from, targets()...))
	b.flows(ctx, 1)
}

// flows waits until n more connections to every target have been opened and seen.
// All that were opened before have then been counted or lost.
func (b *bench) flows(ctx context.Context, n uint64) { nfttest.Check(b.hammer.Wait(ctx, n)) }

// more reports whether there is time for another round.
func (b *bench) more(ctx context.Context) bool { return ctx.Err() == nil && time.Now().Before(b.until) }

// write replaces the agent's file atomically.
func (b *bench) write(p policy) {
	nfttest.Check(os.WriteFile(b.config+".new", p.text, 0o600))
	nfttest.Check(os.Rename(b.config+".new", b.config))
}

// inSync checks, independently of the agent, whether the kernel has the wanted
// rules and nothing of the other mode or an older agent.
func (b *bench) inSync(ctx context.Context, want nft.Ruleset) {
	if diffs := nfttest.Must(b.kernel.Read(ctx, want, nft.TakeOver)).Differences(); len(diffs) > 0 {
		nfttest.Check(fmt.Errorf("the kernel is out of sync: %q", diffs))
	}
}

// awaitSync waits until the kernel is in sync.
func (b *bench) awaitSync(ctx context.Context, want nft.Ruleset) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		err := nfttest.Part(func() { b.inSync(ctx, want) })
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			nfttest.Check(errors.Join(ctx.Err(), err))
		}
	}
}

// try updates by a recipe, with connections through the node, while there is time
// and until enough returns true.
func (b *bench) try(ctx context.Context, bad knownbad.Recipe, enough func() bool) {
	c := b.foreigner()
	defer func() { _ = c.CloseLasting() }()
	both := lists(bad.CIDRs)
	t := nfttest.Must(bad.Install(c, both[0]))
	b.hammerIt(ctx)
	for b.more(ctx) || ctx.Err() == nil && !enough() {
		b.updates++
		nfttest.Check(t.Update(both[b.updates%2]))
	}
}

// whileAway calls fn, which leaves the node without rules or with wrong ones for
// a while, and counts separately what is wrong in the meantime.
func (b *bench) whileAway(ctx context.Context, fn func()) {
	b.flows(ctx, 1)
	before := b.hammer.SoFar()
	fn()
	b.flows(ctx, 1)
	after := b.hammer.SoFar()
	for i := range after.Counts {
		after.Counts[i].Sent -= before.Counts[i].Sent
		after.Counts[i].Pod -= before.Counts[i].Pod
		after.Counts[i].Node -= before.Counts[i].Node
		after.Counts[i].Other -= before.Counts[i].Other
	}
	b.away.Counts = append(b.away.Counts, after.Counts...)
}
