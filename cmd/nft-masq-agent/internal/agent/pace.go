package agent

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"
)

// After a rejection the agent retries after 1 s, 2 s, 4 s and so on up to 1 min,
// each with a jitter of 10 %, so that the nodes of a cluster do not retry
// simultaneously.
const (
	firstTry = time.Second
	lastTry  = time.Minute
)

func backoff(tries int) time.Duration {
	d := firstTry
	for range tries - 1 {
		if d *= 2; d >= lastTry {
			d = lastTry
			break
		}
	}
	return d - d/10 + rand.N(d/5)
}

// wait waits, and reports whether ctx is not done.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// A pace bounds how much work other programs can cause.
//
// A program that commits to its own tables all the time makes us check ours
// needlessly. After a check that took c, the next one is at least 200·c later, so
// that checks take at most 0.5 % of the time, and resyncs as much. For 10,000 CIDRs that is
// two seconds: until then checks leave out the elements of sets, and are limited alike.
//
// A program that reverts our repairs would make us write all the time: after many
// repairs within a minute, they are one second apart.
type pace struct {
	notBefore time.Time // the next check because of a new generation
	frameAt   time.Time // likewise, without the elements of sets
	verifyAt  time.Time // the next one without
	repairs   []time.Time
	slow      bool
}

// checkShare limits everything that is read again and again to 0.5 % of one CPU: the
// next time is at least that many times as far away as the last one took.
const checkShare = 200

const (
	repairWindow = time.Minute
	manyRepairs  = 30
	longPause    = time.Second
)

// checked records a check that found nothing to restore, or failed, its duration, and
// whether there was a new generation. The first one after a quiet time is never delayed.
func (p *pace) checked(now time.Time, took time.Duration, changed bool) {
	p.verifyAt = now.Add(max(verifyEvery, checkShare*took))
	if changed {
		p.notBefore = now.Add(checkShare * took)
	}
}

// restored records that rules were restored. It reports whether repairs are slowed
// down from now on.
func (p *pace) restored(now time.Time) (slowed bool) {
	p.repairs = append(slices.DeleteFunc(p.repairs, func(t time.Time) bool { return now.Sub(t) > repairWindow }), now)
	was := p.slow
	if p.slow = len(p.repairs) >= manyRepairs; p.slow {
		p.frameAt = now.Add(longPause - compareEvery/2) // at a tick, which was just before now
		p.notBefore = p.frameAt
	}
	return p.slow && !was
}
