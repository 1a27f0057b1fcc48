package agent

import "time"

// How changes by others are noticed. While anybody listens to the kernel's
// notifications, large transactions of all programs on the node take a multiple
// of their time and memory, so the agent listens only while transactions are
// small, and otherwise compares generations.
const (
	compareEvery = 250 * time.Millisecond
	// After a start everybody fills their tables.
	startPhase = 2 * time.Minute
	// Listening that proved too expensive is avoided for so long, each time
	// twice as long as before. After longestBreak without that it starts again.
	firstBreak   = time.Hour
	longestBreak = 24 * time.Hour
	// After a repair the agent listens for a while, so that it can name the
	// program if that happens again; if it does, there is a fight.
	afterRepair = time.Minute
	duringFight = 10 * time.Minute
	// Notifications that lead to no repair: so many in a row, and so many a
	// second in the long run.
	idleBurst     = 50
	idlePerSecond = 5
	// After listening has failed.
	retryListening = time.Minute
)

// A detector decides whether the agent listens or compares. It is a value without
// clock or sockets: what happens comes in by its methods.
type detector struct {
	compareUntil time.Time     // then it listens
	listenUntil  time.Time     // even before compareUntil, unless forbidden
	forbidden    bool          // until compareUntil it does not listen in any case
	nextBreak    time.Duration // how long the next break from listening is
	repaired     time.Time     // when rules were last restored
	idle         float64       // idle wake-ups, less those that are allowed
	idleAt       time.Time
}

func newDetector(now time.Time) detector {
	return detector{compareUntil: now.Add(startPhase), nextBreak: firstBreak}
}

// listening says whether the agent listens now.
func (d *detector) listening(now time.Time) bool {
	return !now.Before(d.compareUntil) || !d.forbidden && now.Before(d.listenUntil)
}

// turns returns when that may be different without anything having happened;
// zero: never.
func (d *detector) turns(now time.Time) time.Time {
	switch {
	case !now.Before(d.compareUntil):
		return time.Time{}
	case !d.forbidden && now.Before(d.listenUntil) && d.listenUntil.Before(d.compareUntil):
		return d.listenUntil
	}
	return d.compareUntil
}

// large notes a large transaction, which was made more expensive by listening.
// It returns how long it will not listen.
func (d *detector) large(now time.Time) time.Duration {
	d.forbidden = true
	return d.takeBreak(now)
}

// woken notes a notification that led to no repair. It returns how long it will
// not listen if there are too many of them, else 0. A fight may interrupt that,
// but if they are too many then too, nothing may.
func (d *detector) woken(now time.Time) time.Duration {
	allowed := now.Sub(d.idleAt).Seconds() * idlePerSecond
	d.idle, d.idleAt = max(0, d.idle-allowed)+1, now
	if d.idle <= idleBurst {
		return 0
	}
	d.forbidden = now.Before(d.compareUntil)
	return d.takeBreak(now)
}

func (d *detector) takeBreak(now time.Time) time.Duration {
	if now.Sub(d.compareUntil) > longestBreak {
		d.nextBreak = firstBreak
	}
	length := d.nextBreak
	d.compareUntil, d.listenUntil = now.Add(length), time.Time{}
	d.nextBreak, d.idle = min(2*length, longestBreak), 0
	return length
}

// restored notes that rules were restored that others had changed.
func (d *detector) restored(now time.Time) {
	length := afterRepair
	if !d.repaired.IsZero() && now.Sub(d.repaired) < afterRepair {
		length = duringFight
	}
	if until := now.Add(length); until.After(d.listenUntil) {
		d.listenUntil = until
	}
	d.repaired = now
}

// failed notes that listening is not possible.
func (d *detector) failed(now time.Time) {
	d.listenUntil = time.Time{}
	if retry := now.Add(retryListening); retry.After(d.compareUntil) {
		d.compareUntil = retry
	}
}
