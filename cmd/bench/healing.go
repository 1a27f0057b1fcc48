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
	const bound = 300 // of the 99th percentile, in ms
	took, err := b.heal(ctx, 60)
	if err != nil {
		return err
	}
	for _, q := range []struct {
		name     string
		quantile float64
	}{{"p50", 0.5}, {"p99", 0.99}} {
		r := newRow(groupHealing, defaultSize, q.name, "ms", series{took.quantile(q.quantile)})
		r.Rounds = len(took)
		if q.quantile > 0.9 {
			r = r.target(bound)
		}
		b.add(r)
	}
	return nil
}

func (b *bench) heal(ctx context.Context, times int) (took series, err error) {
	f, err := openFollower(defaultSize, b.agent)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.start(); err != nil {
		return nil, err
	}
	for len(took) < times {
		// At a random time between two comparisons, and longer after the last repair than
		// repairs are apart in a fight.
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(1050*time.Millisecond + rand.N(250*time.Millisecond)):
		}
		d, err := f.heal(f.node.conn)
		if err != nil {
			return nil, err
		}
		took = append(took, d.Seconds())
	}
	return took, nil
}
