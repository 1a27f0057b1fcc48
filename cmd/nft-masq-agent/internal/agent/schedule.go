package agent

import (
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// compareEvery is how often the generation of the ruleset is compared. Joining the kernel's notifications would be
// faster, but while any program does that, large transactions of all programs take several times as much time and
// memory.
const compareEvery = 250 * time.Millisecond

// The longest pauses, so that rules are restored within 10 s, and elements within 10 minutes, whatever checks cost: the
// remaining time is for the comparison and for the check itself. Elements of 10,000 CIDRs are compared within 30 s.
const (
	rulesPause     = 10*time.Second - 2*compareEvery
	elementsPause  = 10*time.Minute - 5*time.Second
	addressesPause = 10 * time.Second
)

// The time in which the kernel lists elements grows with their square: most of a second for 100,000. Next to a program
// that commits again and again that would be more than 1 % of the first minute. So more than fewElements are read once
// nobody has committed for quietTime, or when a resync may read them again.
const (
	fewElements = 11_000 // 10,000 CIDRs, and what the sets contain besides
	quietTime   = 10 * time.Second
)

// A schedule is when the loop checks the kernel without being asked. There are two checks:
//
//	check      what it reads                                    when the generation is another one   otherwise
//	rules      [nft.Frame]: no elements, only their number      within the pace of rules             10 s after the last
//	           and no chains that only maps lead to                                                  check
//	elements   all of [nft.Contents]                            within the pace of elements,
//	                                                            after the rules; if they are
//	                                                            many, when that is quiet
//
// Each check is charged to the pace of its depth. A table that is owned by a process is deleted with its socket,
// without a new generation: hence the 10 s. While the kernel rejects our rules, there are only checks of everything,
// because sets may be filled only in part. A resync reads leftovers and older agents' rules, too, unless nothing was
// committed since these were read, or the last resync that read them was too costly.
type schedule struct {
	rules, elements check
	leftoversSeen   uint32        // generation at which other modes and older agents were looked for; 0: unknown
	checked         time.Time     // when either check was
	compared        uint32        // the generation at the last comparison
	committed       time.Time     // when a comparison last found another generation
	addresses       pace          // of events about the addresses of the node
	spent           time.Duration // processor time of this process at the end of the last event

	ticker *time.Ticker // compares the generation
	timer  *time.Timer  // the next full check, or the next try
	resync time.Duration
	deep   time.Time // until then a resync compares only the frame, because of what the last deep one cost
}

// A check is one of the two kinds, with its pace.
type check struct {
	pace
	seen uint32 // generation at the last one; 0: unknown
}

func newSchedule(resync time.Duration) schedule {
	return schedule{
		rules:     check{pace: pace{share: rulesShare, maxPause: rulesPause}},
		elements:  check{pace: pace{share: elementsShare, maxPause: elementsPause}},
		addresses: pace{share: CheckShare, maxPause: addressesPause},
		ticker:    time.NewTicker(compareEvery),
		timer:     time.NewTimer(resync),
		resync:    resync,
	}
}

// dueCheck returns the check that is due, or false. While the wanted rules are in force, that of rules comes first.
func (a *Agent) dueCheck(v view) (e event, due bool) {
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
	changed := generation != s.rules.seen
	overdue := now.Sub(s.checked) >= rulesPause
	if !v.inForce() {
		if overdue && v.policy.want != nil {
			return s.begin(nft.Contents, generation, now), true
		}
		return a.dueElements(v, generation)
	}
	if changed && !overdue && !s.rules.ready(now) {
		return e, false // the pace makes it wait
	}
	if changed || overdue {
		return s.begin(nft.Frame, generation, now), true
	}
	return a.dueElements(v, generation)
}

// dueElements returns a check of elements if it is due at a generation, or false. If rules of older agents are removed,
// it looks for them, too.
func (a *Agent) dueElements(v view, generation uint32) (e event, due bool) {
	s := &a.schedule
	now := time.Now()
	if generation == s.elements.seen || !s.elements.ready(now) {
		return e, false
	}
	many := v.policy.want != nil && v.policy.want.Elements() > fewElements
	if many && now.Sub(s.committed) < quietTime && now.Before(s.deep) {
		return e, false
	}
	depth := nft.Contents
	if a.takesOver(v) {
		depth = nft.TakeOver
	}
	return s.begin(depth, generation, now), true
}

// begin returns a check that nobody asked for, and records it.
func (s *schedule) begin(depth nft.Depth, generation uint32, now time.Time) event {
	s.recordCheck(depth, 0, generation, now)
	return event{reason: onDrift, depth: depth}
}

// resyncDepth returns what a resync compares.
func (a *Agent) resyncDepth() nft.Depth {
	s := &a.schedule
	if time.Now().Before(s.deep) {
		return nft.Frame
	}
	generation, err := a.in.Generation()
	if err == nil && generation == s.leftoversSeen && generation == s.elements.seen {
		return nft.Frame
	}
	return nft.TakeOver
}

// recordCheck records that a check of this depth was begun or made, so that it is not due again before the ruleset has
// another generation. If only our own transaction lies between the generation at which the kernel was compared and this
// one, deeper checks that were made at the former are still valid, and move to this one, too. comparedAt is 0 if
// nothing was compared.
func (s *schedule) recordCheck(depth nft.Depth, comparedAt, generation uint32, now time.Time) {
	s.rules.seen = generation
	s.checked = now
	if depth > nft.Frame || comparedAt != 0 && comparedAt == s.elements.seen {
		s.elements.seen = generation
	}
	if depth > nft.Contents || comparedAt != 0 && comparedAt == s.leftoversSeen {
		s.leftoversSeen = generation
	}
}

// takesOver reports whether the rules of older agents are removed: only once a config
// has been accepted, whose rules replace them.
func (a *Agent) takesOver(v view) bool { return a.settings.TakeOver && v.policy.accepted }

// depth returns what is compared at an event. With the first accepted config of this run, older agents' rules are among
// it, so that those of the config replace all others in one transaction.
func (a *Agent) depth(v view, e event) nft.Depth {
	depth := e.depth
	if v.policy.accepted && !v.installedAccepted {
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
		s.recordCheck(depth, 0, 0, now) // of no generation, so that it is due again within the pace
	case v.attempt.err != nil: // sets may be filled only in part, and what is left of others was not looked for
		generation, _ := a.in.Generation()
		s.recordCheck(min(depth, nft.Contents), 0, generation, now)
	}
	v.attempt.slowed = s.charge(v.attempt, depth, now)

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
	case v.attempt.reason != onDrift || previous.failure == nil: // a check that others cause does not delay the next try
		s.timer.Reset(Backoff(v.tries))
	}
}

// cost returns the processor time of an event, from the processor times of the process at its begin and its end. It
// includes what the last event has caused outside of the loop since then, up to half as much: the program wakes up, and
// collects garbage.
func (s *schedule) cost(begun, ended time.Duration) time.Duration {
	since := ended - s.spent
	s.spent = ended
	return min(since, (ended-begun)*3/2)
}

// charge charges an event that others can cause as often as they like to the pace of its depth. It reports whether
// repairs are slowed down from now on.
func (s *schedule) charge(attempt attempt, depth nft.Depth, now time.Time) (slowed bool) {
	if attempt.reason == onAddresses {
		s.addresses.repaired(now, attempt.cost) // observers look at the new rules, too
		return false
	}
	if attempt.reason != onDrift && attempt.reason != onResync {
		return false
	}
	repaired := attempt.cause == changedByOthers || attempt.cause == onlyOlderAgents
	switch {
	case depth == nft.Frame && repaired:
		return s.rules.repaired(now, attempt.cost)
	case depth == nft.Frame:
		s.rules.spend(now, attempt.cost)
		return false
	case repaired:
		s.elements.repaired(now, attempt.cost)
		return s.rules.repaired(now, 0)
	}
	s.elements.spend(now, attempt.cost)
	return false
}
