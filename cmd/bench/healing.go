package main

import (
	"context"
	"math/rand/v2"
	"time"

	"nft-masq-agent/nft/nfttest"
)

const groupHealing = "healing of a deleted table, default config"

// healing measures from the end of another program's transaction until the rules
// are effective again.
func (b *bench) healing(ctx context.Context) {
	const bound = 300 // of the 99th percentile, in ms
	b.addQuantiles(groupHealing, "", b.heal(ctx, 60), bound)
}

// addQuantiles adds a row for the median and one for the 99th percentile, which has a target.
func (b *bench) addQuantiles(group, what string, took series, bound float64) {
	median := newRow(group, defaultSize, what+"p50", "ms", series{took.quantile(0.5)})
	late := newRow(group, defaultSize, what+"p99", "ms", series{took.quantile(0.99)}).target(bound)
	median.Rounds, late.Rounds = len(took), len(took)
	b.add(median)
	b.add(late)
}

func (b *bench) heal(ctx context.Context, times int) (took series) {
	f := nfttest.Must(b.follow(defaultSize))
	defer func() { nfttest.Check(f.close()) }()
	for len(took) < times {
		// At a random time between two comparisons, and longer after the last repair than
		// repairs are apart in a fight.
		select {
		case <-ctx.Done():
			nfttest.Check(ctx.Err())
		case <-time.After(1050*time.Millisecond + rand.N(250*time.Millisecond)):
		}
		d := nfttest.Must(f.heal(f.node.conn))
		took = append(took, d.Seconds())
	}
	return took
}
