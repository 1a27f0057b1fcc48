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

// Backoff returns how long to wait after a number of tries.
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

// Wait waits, and reports whether ctx is not done.
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

// CheckShare limits what an observer reads again and again, and changes of addresses, to 0.5 % of one CPU: the next
// time is at least that many times as far away as the last one took.
const CheckShare = 200

// The checks of the kernel have 0.5 % of one CPU together: 0.4 % for rules, and 0.1 % for elements.
const (
	rulesShare    = 250
	elementsShare = 1000
)

// atOnce is for how many seconds of its share a pace lets work be done without a pause:
// 88 ms of processor time for rules, or thirty repairs in a row. What happens after a quiet time is
// never delayed.
const atOnce = 22 * time.Second

// betweenRepairs is the least pause after a repair, or a change of addresses, in the end: so far apart are those
// against a program that reverts them.
const betweenRepairs = time.Second

// A pace bounds the processor time of work that others can cause as often as they like: to
// its share of one CPU, as far as no pause is longer than a bound.
type pace struct {
	share   int           // the work pauses for so many times its cost
	longest time.Duration // pause, whatever was spent
	settled time.Time     // when what was spent will be no more than its share
	slow    bool          // the last repair was not the last one of those at once
}

// ready reports whether there is no pause now.
func (p *pace) ready(now time.Time) bool { return !now.Before(p.settled.Add(-atOnce)) }

// spend records work and its processor time.
func (p *pace) spend(now time.Time, cost time.Duration) {
	if p.settled.Before(now) {
		p.settled = now
	}
	p.settled = p.settled.Add(time.Duration(p.share) * cost)
	if last := now.Add(atOnce + p.longest); p.settled.After(last) {
		p.settled = last
	}
}

// repaired records a repair. It reports whether repairs are slowed down from now on.
func (p *pace) repaired(now time.Time, cost time.Duration) (slowed bool) {
	first := p.settled.Before(now) // however long it took: one repair is no fight
	p.spend(now, max(cost, betweenRepairs/time.Duration(p.share)))
	wasSlow := p.slow
	p.slow = !first && !p.ready(now)
	return p.slow && !wasSlow
}

// ProcessorTime returns the processor time of this process, in user mode and in the kernel. Garbage that a check
// leaves is collected by other threads. What an observer does meanwhile is charged, too.
func ProcessorTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
