package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/agent"
)

// healed is how long the repair took after each repetition of an attack.
type healed struct {
	attack attack
	cidrs  int
	took   []time.Duration // sorted
}

// percentile returns the smallest duration that p percent do not exceed.
func (h healed) percentile(p int) time.Duration {
	return h.took[(len(h.took)*p+99)/100-1]
}

// A notice is a kernel notification of a transaction, and when it was received.
type notice struct {
	at time.Time
	nfnetlink.Change
}

// notices collects the notifications of transactions in the node's namespace.
type notices struct {
	listener *nfnetlink.Listener
	ended    chan struct{}

	mu   sync.Mutex
	all  []notice
	more chan struct{} // closed by each new one
}

func (b *bench) listen() (*notices, error) {
	n := &notices{ended: make(chan struct{}), more: make(chan struct{})}
	err := b.top.Node.Do(func() (err error) {
		n.listener, err = nfnetlink.Listen()
		return err
	})
	if err != nil {
		return nil, err
	}
	go n.run()
	return n, nil
}

func (n *notices) run() {
	defer close(n.ended)
	for {
		c, err := n.listener.Receive()
		if err != nil {
			return
		}
		n.mu.Lock()
		n.all = append(n.all, notice{time.Now(), c})
		close(n.more)
		n.more = make(chan struct{})
		n.mu.Unlock()
	}
}

func (n *notices) close() error {
	err := n.listener.Close()
	<-n.ended
	return err
}

// upTo returns and drops the notifications up to the given generation.
func (n *notices) upTo(ctx context.Context, generation uint32) ([]notice, error) {
	for {
		n.mu.Lock()
		at := slices.IndexFunc(n.all, func(h notice) bool { return h.ID == generation })
		if at >= 0 {
			heard := n.all[:at+1]
			n.all = n.all[at+1:]
			n.mu.Unlock()
			return heard, nil
		}
		more := n.more
		n.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for notification of generation %d: %w", generation, ctx.Err())
		}
	}
}

// spacing is longer than repairs are apart after thirty within a minute.
const spacing = 1100 * time.Millisecond

// heal repeats an attack and measures the time from the attacker's commit to the
// agent's repair. No connections are opened in the meantime.
func (b *bench) heal(ctx context.Context, a attack, cidrs, times int) (healed, error) {
	h := healed{attack: a, cidrs: cidrs}
	p, err := policies(cidrs)
	if err != nil {
		return h, err
	}
	if err := b.write(p[0]); err != nil {
		return h, err
	}
	d, err := b.startAgent(a.mode)
	if err != nil {
		return h, err
	}
	if err := awaitPolicy(ctx, d, p[0].ruleset[a.mode]); err != nil {
		return h, err
	}
	ears, err := b.listen()
	if err != nil {
		return h, err
	}
	pace := time.NewTicker(spacing)
	defer pace.Stop()
	for len(h.took) < times && err == nil {
		<-pace.C
		var took time.Duration
		if took, err = b.healOnce(ctx, a, d, ears); err == nil {
			h.took = append(h.took, took)
		}
	}
	slices.Sort(h.took)
	return h, errors.Join(err, ears.close(), b.inSync(ctx, p[0].ruleset[a.mode]))
}

// healOnce runs an attack and keeps the attacker's socket open: closing it makes
// the agent wait for the kernel.
func (b *bench) healOnce(ctx context.Context, a attack, d *agent.Agent, ears *notices) (took time.Duration, err error) {
	before := restores(d)
	attacker, err := b.attack(a)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, attacker.close()) }()
	start := attacker.over
	if err := restoresAfter(ctx, d, a.name, before); err != nil {
		return 0, err
	}
	generation, err := b.generation()
	if err != nil {
		return 0, err
	}
	heard, err := ears.upTo(ctx, generation)
	if err != nil {
		return 0, err
	}
	// The notice that came first is closest to the commit.
	for _, n := range heard {
		if n.Writer == attacker.port && n.at.Before(start) {
			start = n.at
		}
	}
	last := heard[len(heard)-1]
	if last.Writer == attacker.port {
		return 0, fmt.Errorf("restored after %s, but nothing was written", a.name)
	}
	return last.at.Sub(start), nil
}
