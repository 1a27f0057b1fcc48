package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

const groupHealing = "healing of a deleted table, default config"

// healing measures from the end of another program's transaction until the rules
// are effective again.
func (b *bench) healing(ctx context.Context) error {
	for _, tt := range []struct {
		what    string
		times   int
		pause   time.Duration // longer than repairs are delayed in a fight
		compare bool
		bound   float64 // of the 99th percentile, in ms
	}{
		{"comparing", 60, 1050 * time.Millisecond, true, 300},
		{"listening", 300, 110 * time.Millisecond, false, 5},
	} {
		took, err := b.healingOf(ctx, tt.times, tt.pause, tt.compare)
		if err != nil {
			return err
		}
		for _, q := range []struct {
			name     string
			quantile float64
		}{{"p50", 0.5}, {"p99", 0.99}} {
			r := newRow(groupHealing, defaultSize, tt.what+", "+q.name, "ms", series{took.quantile(q.quantile)})
			r.Rounds = len(took)
			if q.quantile > 0.9 {
				r = r.target(tt.bound)
			}
			b.add(r)
		}
	}
	return nil
}

func (b *bench) healingOf(ctx context.Context, times int, pause time.Duration, compare bool) (took series, err error) {
	f, err := openFollower(defaultSize, b.agent)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.start(); err != nil {
		return nil, err
	}
	if err := f.makeListen(); err != nil {
		return nil, err
	}
	if compare {
		if err := f.endListening(); err != nil {
			return nil, err
		}
	}
	for len(took) < times {
		// At a random time between two comparisons.
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause + rand.N(250*time.Millisecond)):
		}
		// A new attacker each time: one that keeps its socket counts as a daemon
		// that fights back, and repairs are delayed.
		c := dialIn(f.node.ns)
		d, err := f.heal(c)
		if err := errors.Join(err, c.Close()); err != nil {
			return nil, err
		}
		took = append(took, d.Seconds())
	}
	return took, nil
}

// endListening makes the agent poll, without listening, for an hour.
func (f *follower) endListening() error {
	t, err := fillOf(f.node.ns, 2000)
	if err != nil {
		return err
	}
	// An agent that has just restored its rules may begin to listen after the first one.
	const tries, timeout = 10, 2 * time.Second
	for range tries {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		if _, err = t.send(f.node); err == nil {
			_, err = f.agent.Await(ctx, "listening_stopped")
		}
		cancel()
		err = errors.Join(err, f.node.clear(otherTable, 0))
		if err == nil || !errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	return errors.Join(err, t.release())
}
