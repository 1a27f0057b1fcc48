package agent

import (
	"context"
	"math/rand/v2"
	"time"
)

// After a refusal the next try comes after 1 s, 2 s, 4 s and so on up to 1 min,
// each up to a tenth sooner or later, so that the nodes of a cluster do not try
// at the same time.
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

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// A pace bounds what others can make us do.
//
// A program that commits to its own tables all the time makes us check ours for
// nothing. After a check that took c the next one comes no sooner than 200·c
// later, so that checks take 0.5 % of the time at most, and resyncs as much. Until
// then a quick one finds most changes of our rules, and those are restored at once.
//
// A program that undoes our repairs would make us write all the time: after a
// few repairs in a row there is a pause before the next one. A program that does
// so through the same socket is a daemon fighting back, and gets longer pauses
// than one that comes anew each time, a person or a script. Programs that were
// not heard count as one.
type pace struct {
	checkAt  time.Time // the next check that is not quick
	repairAt time.Time // the next check of any kind
	repairs  []repair
	slow     bool      // the last repair was the first slow one
	lastSlow time.Time // so that a pace that changes to and fro is logged once
}

type repair struct {
	at     time.Time
	writer uint32
}

const (
	checkShare = 200

	fewRepairs   = 5  // by one socket within a minute
	someRepairs  = 30 // by one socket within a minute
	repairWindow = time.Minute
	manyRepairs  = 300 // by anybody within ten seconds
	manyWindow   = 10 * time.Second
	shortPause   = 50 * time.Millisecond
	mediumPause  = compareEvery
	longPause    = time.Second
)

// checked notes a check that found nothing to restore, or failed, and what it
// took.
func (p *pace) checked(now time.Time, took time.Duration) {
	p.slow = false
	if at := now.Add(checkShare * took); at.After(p.checkAt) {
		p.checkAt = at
	}
}

// restored notes that rules were restored which a socket had changed; 0 stands
// for an unknown one.
func (p *pace) restored(now time.Time, writer uint32) {
	for len(p.repairs) > 0 && now.Sub(p.repairs[0].at) > repairWindow {
		p.repairs = p.repairs[1:]
	}
	p.repairs = append(p.repairs, repair{now, writer})
	same, many := 0, 0
	for _, r := range p.repairs {
		if r.writer == writer {
			same++
		}
		if now.Sub(r.at) <= manyWindow {
			many++
		}
	}
	pause := time.Duration(0)
	switch {
	case same >= someRepairs:
		pause = longPause
	case same >= fewRepairs:
		pause = mediumPause
	case many >= manyRepairs:
		pause = shortPause
	}
	p.checkAt, p.repairAt, p.slow = now, now.Add(pause), false
	if pause > 0 {
		p.slow, p.lastSlow = now.Sub(p.lastSlow) > repairWindow, now
	}
}

// slowed says, once each time it begins, that repairs are being slowed down.
func (p *pace) slowed() bool { return p.slow }
