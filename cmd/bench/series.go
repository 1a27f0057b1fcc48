package main

import (
	"context"
	"math"
	"slices"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// A series is one value per round, in order.
type series []float64

// quantile interpolates between the two nearest values.
func (s series) quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	at := q * float64(len(sorted)-1)
	below := int(at)
	above := min(below+1, len(sorted)-1)
	return sorted[below] + (at-float64(below))*(sorted[above]-sorted[below])
}

// over divides round by round: a slower machine affects both.
func (s series) over(o series) series {
	ratio := make(series, len(s))
	for i := range s {
		ratio[i] = s[i] / o[i]
	}
	return ratio
}

// times multiplies all values.
func (s series) times(factor float64) series {
	out := make(series, len(s))
	for i := range s {
		out[i] = s[i] * factor
	}
	return out
}

// A spread is a median with the quartiles around it.
type spread struct {
	Median float64
	Q1     float64
	Q3     float64
}

func (s series) spread() spread {
	return spread{Median: s.quantile(0.5), Q1: s.quantile(0.25), Q3: s.quantile(0.75)}
}

// A contender is one of the things measured in turns.
type contender struct {
	prepare func() error // not timed; may be nil
	run     func() (time.Duration, error)
}

// takeTurns measures the contenders in turn, round by round, and returns the
// seconds that each took. The order changes with each round. An extra first round
// is not counted.
func takeTurns(ctx context.Context, rounds int, contenders ...contender) []series {
	all := make([]series, len(contenders))
	for round := range rounds + 1 {
		for i := range contenders {
			at := (round + i) % len(contenders)
			took := nfttest.Must(contenders[at].turn(ctx))
			if round > 0 {
				all[at] = append(all[at], took.Seconds())
			}
		}
	}
	return all
}

func (c contender) turn(ctx context.Context) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if c.prepare != nil {
		if err := c.prepare(); err != nil {
			return 0, err
		}
	}
	return c.run()
}
