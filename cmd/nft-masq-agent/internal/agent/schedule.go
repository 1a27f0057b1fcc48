package agent

import (
	"time"

	"nft-masq-agent/nft/layout"
)

// compareEvery is how often the generation of the ruleset is compared. Joining the
// kernel's notifications would be faster, but while any program does that, large
// transactions of all programs take several times as much time and memory.
const compareEvery = 250 * time.Millisecond

// verifyEvery is how often our table itself is read: one that is owned by a process is
// deleted with its socket, without a new generation.
const verifyEvery = 10 * time.Second

// A schedule is when the loop checks the kernel without being asked.
type schedule struct {
	pace
	ticker     *time.Ticker // compares the generation
	timer      *time.Timer  // the next full check, or the next try
	generation uint32       // when last checked
	framed     uint32       // when last checked without the elements of sets
	changed    bool         // it was checked because of another generation
	deepAt     time.Time    // the next check of more than our rules because of others
	resync     time.Duration
	cost       time.Duration // of the last full check, unless it wrote
}

func newSchedule(resync time.Duration) schedule {
	return schedule{ticker: time.NewTicker(compareEvery), timer: time.NewTimer(resync), resync: resync}
}

func (s *schedule) stop() {
	s.ticker.Stop()
	s.timer.Stop()
}

// compare returns a check that is due: because the generation has changed since the last
// one, or because that was long ago.
func (a *Agent) compare(v view) (e event, due bool) {
	s, now := &a.schedule, time.Now()
	generation, err := a.in.Generation()
	if err != nil {
		return e, false
	}
	e.reason, s.changed = onDrift, generation != s.generation
	if !s.changed {
		return e, !now.Before(s.verifyAt) && v.inForce()
	}
	if now.Before(s.notBefore) {
		if generation == s.framed || now.Before(s.frameAt) || v.refusal != nil {
			return e, false
		}
		e.depth, s.framed = layout.Frame, generation
		return e, true
	}
	s.generation, s.framed = generation, generation
	if a.takesOver(v) && !now.Before(s.deepAt) {
		e.depth = layout.TakeOver
	}
	return e, true
}

// takesOver reports whether the rules of older agents are removed: only once a config
// has been accepted, whose rules replace them.
func (a *Agent) takesOver(v view) bool { return a.settings.TakeOver && v.policy.accepted }

// depth returns what is checked at an event. With the first accepted config that is
// everything, so that its rules replace all others in one transaction.
func (a *Agent) depth(v view, e event) layout.Depth {
	depth := e.depth
	if v.policy.accepted && !v.accepted {
		depth = layout.TakeOver
	}
	if depth == layout.TakeOver && !a.takesOver(v) {
		return layout.Everything
	}
	return depth
}

// plan plans the next checks after a step.
func (a *Agent) plan(v *view, before view, depth layout.Depth) {
	s, now := &a.schedule, time.Now()
	drift := v.step.reason == onDrift && s.changed
	applied := v.step.applied
	if v.step.err != nil {
		s.framed, _ = a.in.Generation() // our rules may be only partly written
	} else if applied != nil {
		s.framed = applied.Generation
	}
	if depth >= layout.Ours {
		s.generation = s.framed
	}
	switch {
	case v.step.err == nil && applied == nil:
	case v.step.err == nil && (v.step.changed == restored || v.step.changed == removed):
		v.step.slowed = s.restored(now)
	case depth == layout.Frame:
		s.frameAt = now.Add(checkShare * v.step.took)
	default:
		s.checked(now, v.step.took, drift && (depth == layout.Ours || v.step.err != nil))
	}
	if depth > layout.Ours && v.refusal == nil {
		s.deepAt = now.Add(checkShare * v.step.took)
	}
	if c := v.policy.content; c.resync > 0 {
		s.resync = c.resync
	}
	full := v.step.reason == onStart || v.step.reason == onResync || v.step.reason == onHangup
	if v.refusal == nil && (full || v.full.IsZero()) {
		v.full, s.cost = now, v.step.took
		if v.step.changed != nothing {
			s.cost = 0
		}
	}
	if v.step.reason == onHangup {
		v.hangups++
	}
	switch {
	case v.refusal == nil:
		s.timer.Reset(max(0, time.Until(v.full.Add(max(s.resync, checkShare*s.cost)))))
	case v.step.reason != onDrift || before.refusal == nil: // other programs do not delay it
		s.timer.Reset(backoff(v.tries))
	}
}
