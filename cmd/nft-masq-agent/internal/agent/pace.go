package agent

import (
	"context"
	"math/rand/v2"
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
// that checks take at most 0.5 % of the time, and resyncs as much. Until then a
// quick check finds most changes of our rules, and those are restored at once.
//
// A program that reverts our repairs would make us write all the time: after a
// few repairs in a row, the next one is delayed. A program that uses the same
// socket is a daemon fighting back, and gets longer delays than one with a new
// socket each time, a person or a script. Unknown programs count as one.
type pace struct {
	checkAt  time.Time // the next check that is not quick
	repairAt time.Time // the next check of any kind
	repairs  []repair
	slow     bool      // the last repair was the first slow one
	lastSlow time.Time // so that alternating paces are logged once
}

type repair struct {
	at     time.Time
	writer uint32
}

// checkShare limits everything that is read again and again to 0.5 % of one CPU: the
// next time is at least that many times as far away as the last one took.
const checkShare = 200

const (
	fewRepairs   = 5  // by one socket within a minute
	someRepairs  = 30 // by one socket within a minute
	repairWindow = time.Minute
	manyRepairs  = 300 // by all programs within ten seconds
	manyWindow   = 10 * time.Second
	shortPause   = 50 * time.Millisecond
	mediumPause  = compareEvery
	longPause    = time.Second
)

// checked records a check that found nothing to restore, or failed, and its
// duration.
func (p *pace) checked(now time.Time, took time.Duration) {
	p.slow = false
	if at := now.Add(checkShare * took); at.After(p.checkAt) {
		p.checkAt = at
	}
}

// restored records that rules changed through a socket were restored; 0 is an
// unknown socket.
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

// slowed reports, once each time it begins, that repairs are being slowed down.
func (p *pace) slowed() bool { return p.slow }
