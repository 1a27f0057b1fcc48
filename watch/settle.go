package watch

import "time"

// A tempo says how long content has to stand still before it is believed.
type tempo struct {
	quiet   time.Duration // after a write in place, or when the file vanished
	grace   time.Duration // when a file appeared that a rename or an open may have made
	spacing time.Duration // least time between two reads while somebody writes
	first   time.Duration // most that the first content is held back
}

// usual is what the package promises. The grace only has to outlast the way of
// an event through the kernel's queue: whoever creates a file and writes to it
// causes a write event that ends the grace.
func usual() tempo {
	return tempo{
		quiet:   50 * time.Millisecond,
		grace:   5 * time.Millisecond,
		spacing: 10 * time.Millisecond,
		first:   500 * time.Millisecond,
	}
}

// A change is a set of things that happened since the last look.
type change uint8

const (
	asked   change = 1 << iota // somebody asks to look, or something else happened
	swapped                    // a link or directory was put on the way
	created                    // a file was put at the end: by rename, link or open
	removed                    // something on the way or at its end went away
	written                    // the file was written in place
)

// then adds what happened next. When one single file is followed, whatever
// takes its place makes writes to the one before it irrelevant.
func (c change) then(next change, single bool) change {
	if single && next&(swapped|created|removed) != 0 {
		c &^= written
	}
	return c | next
}

// A sight is what a look saw: for every file, by the name it is asked for, what
// that name leads to.
type sight map[string]target

type target struct {
	links  string // the symbolic links passed, and where they point
	exists bool
	id     identity
	size   uint64
	mtime  time.Time
}

// pace says how long content has to stand still, where before was seen with the
// content before it (nil: there is none), c happened since, and after is seen
// now, at time t.
func (p tempo) pace(c change, before, after sight, t time.Time) time.Duration {
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
		// The same files have other content and nobody said why: no inotify, a
		// write through another name, a write whose event is still to come.
		return p.quiet
	}
	return wait
}

// appeared is pace for a name that leads to another file than before.
func (p tempo) appeared(c change, old, now target, t time.Time) time.Duration {
	switch {
	case now.links != "" && now.links != old.links:
		return 0 // a link was turned to a file that is ready
	case old.exists && c&(swapped|created) != 0 && c&removed == 0:
		return 0 // the name never went, so it was a rename
	case t.Sub(now.mtime) >= p.quiet:
		return 0 // put there as a whole: nobody has written to it lately
	case c&created != 0 && now.size > 0:
		return p.grace
	default:
		return p.quiet
	}
}

// A settler decides, look by look, when content has settled. It does no input
// or output and has no clock.
type settler struct {
	tempo

	begun    bool   // whether any content has settled
	settled  string // fingerprint of the last that has
	seen     sight  // what was there then
	happened change // what happened since
	limit    time.Time

	waiting bool
	sample  string // fingerprint that has stood still since
	since   time.Time
	stand   time.Duration // how long it has to
	due     time.Time     // of the look asked for last
	late    bool          // whether one came late since
}

// step takes in a look at time t, after c, that saw now and read content with
// that fingerprint. It says whether the content is settled and new; if not, and
// wait is not zero, there has to be another look after wait.
func (s *settler) step(t time.Time, c change, now sight, fingerprint string) (done bool, wait time.Duration) {
	if s.begun && fingerprint == s.settled {
		s.rest(now)
		return false, 0
	}
	several := len(now) > 1
	s.happened = s.happened.then(c, !several)
	pace := s.pace(s.happened, s.seen, now, t)
	if s.waiting && several && !turned(s.seen, now) {
		// A swap of one file says nothing about a write to another.
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
	if c&^asked == 0 && t.Sub(s.due) > s.grace && !s.due.IsZero() && !s.late {
		// This process was not running for a while. Events of that time may wait
		// in the queue behind this look.
		s.late, until = true, t.Add(s.grace)
	}
	if t.Before(until) {
		s.due = until
		return false, until.Sub(t)
	}
	s.begun, s.settled = true, fingerprint
	s.rest(now)
	return true, 0
}

// turned says that a link was turned on the way to every file: what the ones
// before did is past.
func turned(before, after sight) bool {
	for name, now := range after {
		if now.links == "" || now.links == before[name].links {
			return false
		}
	}
	return true
}

// rest begins anew with what is there now.
func (s *settler) rest(now sight) {
	s.waiting, s.seen, s.happened, s.due = false, now, 0, time.Time{}
}

// defers says how long a look after c can wait, so that somebody who writes all
// the time does not make us read all the time. The last read was at read.
func (s *settler) defers(t, read time.Time, c change) time.Duration {
	if !s.waiting || c&written == 0 || c&^(asked|written) != 0 {
		return 0
	}
	return read.Add(s.spacing).Sub(t)
}
