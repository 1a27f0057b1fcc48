package agent

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"
)

// After a rejection the agent retries after 1 s, 2 s, 4 s and so on up to 1 min,
// each with a jitter of 10 %, so that the nodes of a cluster do not retry
// simultaneously.
const (
	firstTry = time.Second
	lastTry  = time.Minute
)

// Backoff returns how long to wait after a number of failed tries, at least one.
func Backoff(tries int) time.Duration {
	d := firstTry
	for range tries - 1 {
		d *= 2
		if d >= lastTry {
			d = lastTry
			break
		}
	}
	return d - d/10 + rand.N(d/5)
}

// Wait waits for a time, and returns false if ctx is done before that.
func Wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// CheckShare limits what an observer reads again and again, and changes of addresses, to 0.5 % of one CPU: the pause is
// at least that many times as long as the work took.
const CheckShare = 200

// The checks of the kernel have 0.5 % of one CPU together: 0.4 % for rules, and 0.1 % for elements.
const (
	rulesShare    = 250
	elementsShare = 1000
)

// burst is how far ahead of its share the work of a pace may be before it has to pause: for rules 88 ms of processor
// time, or thirty repairs, one every 250 ms. The first work after a quiet time is never delayed.
const burst = 22 * time.Second

// minRepairPause is the least time from one repair, or change of addresses, to the next once the burst is used up:
// against a program that reverts each of them.
const minRepairPause = time.Second

// A pace limits the processor time of work that others can cause as often as they like to a share of one CPU, but never
// by a pause longer than maxPause.
type pace struct {
	share    int           // after the work comes a pause of so many times its cost
	maxPause time.Duration // whatever was spent
	settled  time.Time     // when the processor time that was spent will be within the share
	slow     bool          // the last repair used up the burst
}

// ready reports whether there is no pause now.
func (p *pace) ready(now time.Time) bool { return !now.Before(p.settled.Add(-burst)) }

// spend records work and its processor time.
func (p *pace) spend(now time.Time, cost time.Duration) {
	if p.settled.Before(now) {
		p.settled = now
	}
	p.settled = p.settled.Add(time.Duration(p.share) * cost)
	if last := now.Add(burst + p.maxPause); p.settled.After(last) {
		p.settled = last
	}
}

// repaired records a repair. It reports whether repairs are slowed down from now on. However long one repair took after
// a quiet time, it is no fight.
func (p *pace) repaired(now time.Time, cost time.Duration) (slowed bool) {
	first := p.settled.Before(now)
	p.spend(now, max(cost, minRepairPause/time.Duration(p.share)))
	wasSlow := p.slow
	p.slow = !first && !p.ready(now)
	return p.slow && !wasSlow
}

// ProcessorTime returns the processor time of all threads of this process, in user mode and in the kernel, because
// other threads collect the garbage that a check leaves. So it has what an observer does meanwhile, too.
func ProcessorTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
