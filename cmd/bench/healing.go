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
	if err == nil {
		b.addQuantiles(groupHealing, "", took, bound)
	}
	return err
}

// addQuantiles adds a row for the median and one for the 99th percentile, which has a target.
func (b *bench) addQuantiles(group, what string, took series, bound float64) {
	median := newRow(group, defaultSize, what+"p50", "ms", series{took.quantile(0.5)})
	late := newRow(group, defaultSize, what+"p99", "ms", series{took.quantile(0.99)}).target(bound)
	median.Rounds, late.Rounds = len(took), len(took)
	b.add(median)
	b.add(late)
}

func (b *bench) heal(ctx context.Context, times int) (took series, err error) {
	f, err := b.follow(defaultSize)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
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
