package agent

import "time"

// How other programs' changes are noticed. While any program listens to the
// kernel's notifications, large transactions of all programs on the node take
// several times as much time and memory. So the agent listens only while
// transactions are small, and polls the generation otherwise.
const (
	compareEvery = 250 * time.Millisecond
	// After a start, all programs fill their tables.
	startPhase = 2 * time.Minute
	// After listening proved too expensive, it is avoided for firstBreak,
	// doubling each time. After longestBreak without that, it starts over.
	firstBreak   = time.Hour
	longestBreak = 24 * time.Hour
	// After a repair the agent listens for a while, so that it can name the
	// program if it happens again. If it does, there is a fight.
	afterRepair = time.Minute
	duringFight = 10 * time.Minute
	// Limits for notifications without a repair: a burst, and a long-term rate
	// per second.
	idleBurst     = 50
	idlePerSecond = 5
	// Retry after listening has failed.
	retryListening = time.Minute
)

// A detector decides whether the agent listens or polls. It is a value without
// clock or sockets: events are method calls.
type detector struct {
	compareUntil time.Time     // after that it listens
	listenUntil  time.Time     // even before compareUntil, unless forbidden
	forbidden    bool          // it does not listen before compareUntil in any case
	nextBreak    time.Duration // how long the next break from listening is
	repaired     time.Time     // when rules were last restored
	idle         float64       // idle wake-ups minus the allowed ones
	idleAt       time.Time
}

func newDetector(now time.Time) detector {
	return detector{compareUntil: now.Add(startPhase), nextBreak: firstBreak}
}

// listening reports whether the agent listens now.
func (d *detector) listening(now time.Time) bool {
	return !now.Before(d.compareUntil) || !d.forbidden && now.Before(d.listenUntil)
}

// turns returns when that changes without an event; zero: never.
func (d *detector) turns(now time.Time) time.Time {
	switch {
	case !now.Before(d.compareUntil):
		return time.Time{}
	case !d.forbidden && now.Before(d.listenUntil) && d.listenUntil.Before(d.compareUntil):
		return d.listenUntil
	}
	return d.compareUntil
}

// large records a large transaction, which listening made more expensive. It
// returns the length of the break.
func (d *detector) large(now time.Time) time.Duration {
	d.forbidden = true
	return d.takeBreak(now)
}

// woken records a notification without a repair. It returns the length of the
// break if there are too many of them, otherwise 0. A fight may interrupt the
// break, unless there are too many during the fight, too.
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

// restored records that rules changed by another program were restored.
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

// failed records that listening is not possible.
func (d *detector) failed(now time.Time) {
	d.listenUntil = time.Time{}
	if retry := now.Add(retryListening); retry.After(d.compareUntil) {
		d.compareUntil = retry
	}
}
