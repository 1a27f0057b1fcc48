package agent

import (
	"math/rand/v2"
	"time"
)

// After a refusal the next try comes after 1 s, 2 s, 4 s and so on up to 1 min,
// each up to a tenth sooner or later, so that the nodes of a cluster do not try
// in step.
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

// A pace bounds what others can make us do.
//
// A program that commits to its own table all the time makes us look at ours
// for nothing. Looks that find nothing spend a credit, which grows by half a
// hundredth of a processor up to what a few hundred small looks cost; once it is
// spent a look waits until it has grown again, but for a second at most.
//
// A program that undoes our repairs would make us write all the time: after a
// few repairs in a row a pause is made before the next one. One that does so
// through the same socket is a daemon fighting back, and gets long pauses; one
// that comes anew each time, a person or a script, gets short ones.
type pace struct {
	notBefore time.Time
	spent     time.Duration // of the credit, when a look last found nothing
	spentAt   time.Time
	inVain    bool // the last look found nothing
	repairs   []repair
	slow      bool      // the last repair was the first slow one
	lastSlow  time.Time // so that a pace that changes to and fro is said once
}

type repair struct {
	at     time.Time
	writer uint32
}

const (
	lookShare  = 200 // a look may cost one part in so many
	lookCredit = 50 * time.Millisecond
	// To wake up and to go to sleep again costs more than a small look does. With
	// this much an agent beside 100 commits a second was seen to take 0.7 % of a
	// processor.
	wakeCost  = 300 * time.Microsecond
	mostPause = time.Second
	// So long before the next look its reasons are to be heard, for their names.
	beforeLook = 2 * time.Millisecond

	repairWindow = 10 * time.Second
	someRepairs  = 30  // by one socket
	manyRepairs  = 300 // by anybody
	shortPause   = 50 * time.Millisecond
	longPause    = time.Second
)

// wait says how long to wait before the next look.
func (p *pace) wait(now time.Time) time.Duration { return max(0, p.notBefore.Sub(now)) }

// looked notes a look, what it cost, and whether it repaired something.
func (p *pace) looked(now time.Time, cost time.Duration, repaired bool, writer uint32) {
	p.slow, p.inVain = false, !repaired
	if !repaired {
		p.spent = max(0, p.spent-now.Sub(p.spentAt)/lookShare) + cost + wakeCost
		p.spentAt = now
		p.notBefore = now.Add(min(mostPause, lookShare*max(0, p.spent-lookCredit)))
		return
	}
	for len(p.repairs) > 0 && now.Sub(p.repairs[0].at) > repairWindow {
		p.repairs = p.repairs[1:]
	}
	p.repairs = append(p.repairs, repair{now, writer})
	same := 0
	for _, r := range p.repairs {
		if r.writer == writer && writer != 0 {
			same++
		}
	}
	p.notBefore = now
	switch {
	case same > someRepairs:
		p.notBefore = now.Add(longPause)
	case len(p.repairs) > manyRepairs:
		p.notBefore = now.Add(shortPause)
	}
	if p.notBefore.After(now) {
		p.slow, p.lastSlow = now.Sub(p.lastSlow) > repairWindow, now
	}
}

// slowed says, once each time it begins, that repairs are being slowed down.
func (p *pace) slowed() bool { return p.slow }
