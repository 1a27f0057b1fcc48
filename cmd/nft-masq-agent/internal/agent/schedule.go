package agent

import (
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// compareEvery is how often the generation of the ruleset is compared. Joining the
// kernel's notifications would be faster, but while any program does that, large
// transactions of all programs take several times as much time and memory.
const compareEvery = 250 * time.Millisecond

// The longest pauses, so that rules are restored within 10 s, and elements within 10 minutes, whatever checks cost: the
// rest is for the comparison and for the check itself. Elements of 10,000 CIDRs are compared within 30 s.
const (
	rulesPause     = 10*time.Second - 2*compareEvery
	elementsPause  = 10*time.Minute - 5*time.Second
	addressesPause = 10 * time.Second
)

// The kernel lists more than fewElements only in a time that grows with their square, most of a second for 100,000.
// Next to a program that commits again and again that would be more than 1 % of the first minute. So these elements
// are read once nobody has committed for quietTime, or as long as no resync would read them.
const (
	fewElements = 10_000
	quietTime   = 10 * time.Second
)

// A schedule is when the loop checks the kernel without being asked. There are two checks:
//
//	check      what it reads                                    when the generation is another one   otherwise
//	rules      all but elements, of which the number, and       within the pace of rules             10 s after the last
//	           but chains that only maps lead to                                                     check
//	elements   everything                                       within the pace of elements,
//	                                                            after the rules; if they are
//	                                                            many, when that is quiet
//
// Each check is charged to the pace of its depth. A table that is owned by a process is deleted with its socket,
// without a new generation: hence the 10 s. While the kernel rejects our rules, there are only checks of everything,
// because sets may be filled only in part. A resync reads everything, unless nothing was committed since that was read,
// or the last one that did so was too costly.
type schedule struct {
	rules, elements check
	everything      uint32        // generation at which other modes and older agents were looked for; 0: unknown
	checked         time.Time     // when either check was
	compared        uint32        // the generation at the last comparison
	committed       time.Time     // when a comparison last found another generation
	addresses       pace          // of events about the addresses of the node
	spent           time.Duration // processor time of this process at the end of the last event

	ticker *time.Ticker // compares the generation
	timer  *time.Timer  // the next full check, or the next try
	resync time.Duration
	deep   time.Time // before, no resync reads everything, because of what the last one cost
}

// A check is one of the two, with its pace.
type check struct {
	pace
	seen uint32 // generation at the last one; 0: unknown
}

func (c *check) due(generation uint32, now time.Time) bool {
	return generation != c.seen && c.ready(now)
}

func newSchedule(resync time.Duration) schedule {
	return schedule{
		rules:     check{pace: pace{share: rulesShare, longest: rulesPause}},
		elements:  check{pace: pace{share: elementsShare, longest: elementsPause}},
		addresses: pace{share: CheckShare, longest: addressesPause},
		ticker:    time.NewTicker(compareEvery),
		timer:     time.NewTimer(resync),
		resync:    resync,
	}
}

func (s *schedule) stop() {
	s.ticker.Stop()
	s.timer.Stop()
}

// compare returns a check that is due.
func (a *Agent) compare(v view) (e event, due bool) {
	s := &a.schedule
	now := time.Now()
	generation, err := a.in.Generation()
	if err != nil {
		return e, false
	}
	if generation != s.compared {
		s.compared = generation
		s.committed = now
	}
	overdue := now.Sub(s.checked) >= rulesPause
	switch {
	case v.inForce() && generation != s.rules.seen && !s.rules.ready(now) && !overdue:
		return e, false
	case v.inForce() && (generation != s.rules.seen || overdue):
		s.recordCheck(nft.Frame, 0, generation, now)
		return event{reason: onDrift, depth: nft.Frame}, true
	case v.policy.want != nil && overdue:
		s.recordCheck(nft.Contents, 0, generation, now)
		return event{reason: onDrift, depth: nft.Contents}, true
	}
	return a.compareElements(v, generation)
}

// compareElements returns a check of everything, if it is due at a generation.
func (a *Agent) compareElements(v view, generation uint32) (e event, due bool) {
	s := &a.schedule
	now := time.Now()
	if !s.elements.due(generation, now) {
		return e, false
	}
	many := v.policy.want != nil && v.policy.want.Elements() > fewElements
	if many && now.Sub(s.committed) < quietTime && now.Before(s.deep) {
		return e, false
	}
	e = event{reason: onDrift, depth: nft.Contents}
	if a.takesOver(v) {
		e.depth = nft.TakeOver
	}
	s.recordCheck(e.depth, 0, generation, now)
	return e, true
}

// resyncDepth returns what a resync compares.
func (a *Agent) resyncDepth() nft.Depth {
	s := &a.schedule
	if time.Now().Before(s.deep) {
		return nft.Frame
	}
	generation, err := a.in.Generation()
	if err == nil && generation == s.everything && generation == s.elements.seen {
		return nft.Frame
	}
	return nft.TakeOver
}

// recordCheck records at which generation something was right. What was right at the generation that was read, and was
// not compared, is so, too.
func (s *schedule) recordCheck(depth nft.Depth, read, generation uint32, now time.Time) {
	s.rules.seen = generation
	s.checked = now
	if depth > nft.Frame || read != 0 && read == s.elements.seen {
		s.elements.seen = generation
	}
	if depth > nft.Contents || read != 0 && read == s.everything {
		s.everything = generation
	}
}

// takesOver reports whether the rules of older agents are removed: only once a config
// has been accepted, whose rules replace them.
func (a *Agent) takesOver(v view) bool { return a.settings.TakeOver && v.policy.accepted }

// depth returns what is checked at an event. With the first accepted config that is
// everything, so that its rules replace all others in one transaction.
func (a *Agent) depth(v view, e event) nft.Depth {
	depth := e.depth
	if v.policy.accepted && !v.accepted {
		depth = nft.TakeOver
	}
	if depth == nft.TakeOver && !a.takesOver(v) {
		return nft.WithLeftovers
	}
	return depth
}

// plan plans the next checks after an attempt.
func (a *Agent) plan(v *view, previous view, depth nft.Depth) {
	s := &a.schedule
	now := time.Now()
	switch {
	case v.attempt.applied != nil:
		s.recordCheck(depth, v.attempt.applied.Read, v.attempt.applied.Generation, now)
	case kernel.Delayed(v.attempt.err):
		s.recordCheck(depth, 0, 0, now) // again, within the pace
	case v.attempt.err != nil: // our rules may be only partly written
		generation, _ := a.in.Generation()
		s.recordCheck(depth, 0, generation, now)
	}
	v.attempt.slowed = s.charge(*v, depth, now)

	full := v.attempt.reason == onStart || v.attempt.reason == onResync || v.attempt.reason == onHangup
	if v.failure == nil && (full || v.resynced.IsZero()) {
		v.resynced = now
		if depth > nft.Contents {
			s.deep = now.Add(min(elementsShare*v.attempt.cost, elementsPause))
		}
	}
	if v.attempt.reason == onHangup {
		v.hangups++
	}
	if c := v.policy.content; c.resync > 0 {
		s.resync = c.resync
	}
	switch {
	case v.failure == nil:
		s.timer.Reset(max(0, time.Until(v.resynced.Add(s.resync))))
	case v.attempt.reason != onDrift || previous.failure == nil: // other programs do not delay it
		s.timer.Reset(Backoff(v.tries))
	}
}

// cost returns the processor time of an event that began and ended at a time of the process. With it goes what it has
// caused since the last one outside of the loop, up to half as much: that the program wakes up, and collects garbage.
func (s *schedule) cost(begun, ended time.Duration) time.Duration {
	since := ended - s.spent
	s.spent = ended
	return min(since, (ended-begun)*3/2)
}

// charge charges what others have caused to the pace of its depth. It reports whether repairs are slowed down from now
// on.
func (s *schedule) charge(v view, depth nft.Depth, now time.Time) (slowed bool) {
	repaired := v.attempt.changed == restored || v.attempt.changed == removed
	switch {
	case v.attempt.reason == onAddresses:
		s.addresses.repaired(now, v.attempt.cost) // observers look at the new rules, too
	case v.attempt.reason != onDrift && v.attempt.reason != onResync:
	case depth == nft.Frame && repaired:
		return s.rules.repaired(now, v.attempt.cost)
	case depth == nft.Frame:
		s.rules.spend(now, v.attempt.cost)
	case repaired:
		s.elements.repaired(now, v.attempt.cost)
		return s.rules.repaired(now, 0)
	default:
		s.elements.spend(now, v.attempt.cost)
	}
	return false
}
