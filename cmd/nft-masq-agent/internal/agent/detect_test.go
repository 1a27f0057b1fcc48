package agent

import (
	"testing"
	"time"
)

// A clock is a detector with a clock.
type clock struct {
	detector
	t   *testing.T
	now time.Time
}

func newClock(t *testing.T) *clock {
	now := time.Now()
	return &clock{newDetector(now), t, now}
}

// changesAfter fails the test unless the detector changes between listening and
// polling after exactly that time, without an event.
func (c *clock) changesAfter(d time.Duration) {
	c.t.Helper()
	before := c.listening(c.now)
	if turns := c.turns(c.now); !turns.Equal(c.now.Add(d)) {
		c.t.Fatalf("changes after %s, want %s", turns.Sub(c.now), d)
	}
	if c.listening(c.now.Add(d-1)) != before {
		c.t.Fatalf("does not listen=%t until then", before)
	}
	c.now = c.now.Add(d)
	if c.listening(c.now) == before {
		c.t.Fatalf("still listens=%t", before)
	}
}

func (c *clock) listens(want bool) {
	c.t.Helper()
	if c.listening(c.now) != want {
		c.t.Fatalf("listens: %t, want %t", !want, want)
	}
}

func TestDetectorPollsForTwoMinutesAndThenListens(t *testing.T) {
	c := newClock(t)
	c.listens(false)
	c.changesAfter(2 * time.Minute)
	if turns := c.turns(c.now); !turns.IsZero() {
		t.Errorf("ends listening after %s", turns.Sub(c.now))
	}
}

func TestBreaksAfterLargeTransactionsDouble(t *testing.T) {
	c := newClock(t)
	c.changesAfter(2 * time.Minute)
	for _, hours := range []int{1, 2, 4, 8, 16, 24, 24} {
		period := time.Hour * time.Duration(hours)
		c.now = c.now.Add(time.Minute)
		if d := c.large(c.now); d != period {
			t.Fatalf("for %s, want %d h", d, hours)
		}
		c.listens(false)
		c.changesAfter(period)
	}
	c.now = c.now.Add(25 * time.Hour)
	if d := c.large(c.now); d != time.Hour {
		t.Errorf("for %s after a quiet day", d)
	}
}

func TestFrequentIdleWakeUpsEndListening(t *testing.T) {
	c := newClock(t)
	c.changesAfter(2 * time.Minute)
	for range 100 * idlePerSecond {
		c.now = c.now.Add(time.Second / idlePerSecond)
		if d := c.woken(c.now); d != 0 {
			t.Fatalf("stops listening for %s at %d idle wake-ups a second", d, idlePerSecond)
		}
	}
	woken := 0
	for ; c.woken(c.now) == 0; woken++ {
		c.now = c.now.Add(10 * time.Millisecond)
	}
	if woken < 30 || woken > 60 {
		t.Errorf("stops listening after %d", woken)
	}
	c.listens(false)
	c.changesAfter(time.Hour)
}

func TestDetectorListensForTenMinutesInAFight(t *testing.T) {
	c := newClock(t)
	c.restored(c.now)
	c.changesAfter2(time.Minute, 2*time.Minute)
	c = newClock(t)
	c.restored(c.now)
	c.now = c.now.Add(time.Minute - 1)
	c.restored(c.now)
	c.listens(true)
	c.now = c.now.Add(5 * time.Minute)
	c.large(c.now)
	c.restored(c.now)
	c.restored(c.now)
	c.listens(false) // a large transaction forbids it
	c.changesAfter(time.Hour)

	// A fight restarts listening once after idle wake-ups ended it.
	c.idleOut()
	c.listens(false)
	c.restored(c.now)
	c.restored(c.now)
	c.changesAfter2(10*time.Minute, 2*time.Hour)
	c.idleOut()
	c.restored(c.now)
	c.idleOut()
	c.restored(c.now)
	c.listens(false)
}

// changesAfter2 is changesAfter twice: listening ends, and starts again.
func (c *clock) changesAfter2(ends, begins time.Duration) {
	c.t.Helper()
	c.listens(true)
	c.changesAfter(ends)
	c.changesAfter(begins - ends)
}

func (c *clock) idleOut() {
	c.t.Helper()
	for range idleBurst + 1 {
		if c.woken(c.now) > 0 {
			return
		}
	}
	c.t.Fatal("idle wake-ups do not end listening")
}

func TestFailedListeningIsRetriedAfterAMinute(t *testing.T) {
	c := newClock(t)
	c.changesAfter(2 * time.Minute)
	c.failed(c.now)
	c.changesAfter(time.Minute)
}
