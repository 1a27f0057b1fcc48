package watch

import (
	"fmt"
	"time"
)

// A timing determines how long content must be unchanged before it counts as
// settled, and what is waited for until then.
type timing struct {
	quiet   time.Duration // after a write in place, or after the file vanished
	grace   time.Duration // after a file appeared by rename or open
	spacing time.Duration // least time between two reads during writes
	first   time.Duration // longest delay of the first content
	arm     time.Duration // longest renewal of the watches, which never returns on a dead mount
}

// defaultTiming is what the package guarantees. The grace period only has to
// outlast an event's way through the kernel's queue: creating a file and writing
// to it causes a write event, which ends it.
func defaultTiming() timing {
	return timing{
		quiet:   50 * time.Millisecond,
		grace:   5 * time.Millisecond,
		spacing: 10 * time.Millisecond,
		first:   500 * time.Millisecond,
		arm:     2 * time.Second,
	}
}

// A change is a set of things that happened since the last poll.
type change uint8

const (
	polled  change = 1 << iota // a poll was requested, or something else happened
	swapped                    // a link or directory appeared on the way
	created                    // a file appeared at the end: by rename, link or open
	removed                    // something on the way or at the end was removed
	written                    // the file was written in place
)

// then adds what happened next. If a single file is followed, its replacement
// makes earlier writes irrelevant.
func (c change) then(next change, single bool) change {
	if single && next&(swapped|created|removed) != 0 {
		c &^= written
	}
	return c | next
}

// A snapshot is what a poll found: for every file, by the name that was
// requested, what that name leads to.
type snapshot map[string]target

// place identifies the files. Of a nil snapshot it is "".
func (s snapshot) place() string {
	if s == nil {
		return ""
	}
	ids := map[string]identity{}
	for name, t := range s {
		ids[name] = t.id
	}
	return fmt.Sprint(ids)
}

type target struct {
	links  string // the symbolic links on the way, and their targets
	exists bool
	id     identity
	size   uint64
	mtime  time.Time
}

// quietTime returns how long content must be unchanged. before is the snapshot of
// the previous content (nil: none), c happened since, and after is the snapshot
// at time t.
func (p timing) quietTime(c change, before, after snapshot, t time.Time) time.Duration {
	if c&written != 0 {
		return p.quiet
	}
	wait, differs := time.Duration(0), before == nil
	for name, old := range before {
		if old.exists && !after[name].exists {
			differs = true
			if c&swapped == 0 || c&removed != 0 {
				wait = p.quiet
			}
		}
	}
	for name, now := range after {
		old := before[name]
		if now.exists && (!old.exists || old.id != now.id) {
			differs = true
			wait = max(wait, p.appeared(c, old, now, t))
		}
	}
	if !differs {
		// The same files have other content without an event: no inotify, a write
		// through another name, or a write whose event is still pending.
		return p.quiet
	}
	return wait
}

// appeared is quietTime for a name that now leads to another file.
func (p timing) appeared(c change, old, now target, t time.Time) time.Duration {
	switch {
	case now.links != "" && now.links != old.links:
		return 0 // a link was switched to a complete file
	case old.exists && c&(swapped|created) != 0 && c&removed == 0:
		return 0 // the name was never missing, so it was a rename
	case t.Sub(now.mtime) >= p.quiet:
		return 0 // moved here complete: it was not written recently
	case c&created != 0 && now.size > 0:
		return p.grace
	default:
		return p.quiet
	}
}

// A settler decides, poll by poll, when content has settled. It does no I/O and
// has no clock.
type settler struct {
	timing

	begun    bool     // whether any content has settled
	settled  string   // fingerprint of the last that did
	seen     snapshot // snapshot at that time
	happened change   // what happened since
	limit    time.Time

	waiting bool
	sample  string // fingerprint unchanged since then
	since   time.Time
	stand   time.Duration // how long it must be
	due     time.Time     // of the last requested poll
	late    bool          // whether a poll was late since
}

// step handles a poll at time t, after c, which found now and read content with
// that fingerprint. It reports whether the content is settled and new; if not,
// and wait is not zero, poll again after wait.
func (s *settler) step(t time.Time, c change, now snapshot, fingerprint string) (done bool, wait time.Duration) {
	if s.begun && fingerprint == s.settled {
		s.reset(now)
		return false, 0
	}
	several := len(now) > 1
	s.happened = s.happened.then(c, !several)
	pace := s.quietTime(s.happened, s.seen, now, t)
	if s.waiting && several && !allSwapped(s.seen, now) {
		// A swap of one file does not explain a write to another.
		pace = max(pace, s.stand)
	}
	if !s.waiting || fingerprint != s.sample || c&written != 0 {
		s.waiting, s.sample, s.since, s.stand, s.late = true, fingerprint, t, pace, false
	}
	s.stand = min(s.stand, pace)
	until := s.since.Add(s.stand)
	if !s.begun {
		if s.limit.IsZero() {
			s.limit = t.Add(s.first)
		}
		if s.limit.Before(until) {
			until = s.limit
		}
	}
	if c&^polled == 0 && t.Sub(s.due) > s.grace && !s.due.IsZero() && !s.late {
		// This process was not running for a while. Events from that time may
		// still be queued.
		s.late, until = true, t.Add(s.grace)
	}
	if t.Before(until) {
		s.due = until
		return false, until.Sub(t)
	}
	s.begun, s.settled = true, fingerprint
	s.reset(now)
	return true, 0
}

// allSwapped reports whether a link was switched on the way to every file, so
// that writes to the old ones are irrelevant.
func allSwapped(before, after snapshot) bool {
	for name, now := range after {
		if now.links == "" || now.links == before[name].links {
			return false
		}
	}
	return true
}

// reset starts over with the current snapshot.
func (s *settler) reset(now snapshot) {
	s.waiting, s.seen, s.happened, s.due = false, now, 0, time.Time{}
}

// delay returns how long to put off a poll after c, so that a busy writer does
// not make us read all the time. The last read was at read.
func (s *settler) delay(t, read time.Time, c change) time.Duration {
	if !s.waiting || c&written == 0 || c&^(polled|written) != 0 {
		return 0
	}
	return read.Add(s.spacing).Sub(t)
}
