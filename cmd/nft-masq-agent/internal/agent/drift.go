package agent

import (
	"context"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
)

// drift detects other programs' changes, and records what is known about them.
type drift struct {
	detector   detector
	pace       pace
	alarm      *time.Timer
	listening  bool
	failing    bool      // listening fails, which was logged
	due        time.Time // the next check; zero: none until a change is notified
	generation uint32    // of the ruleset, when last checked; 0: check now
	compared   int       // number of polls since our table was read
	heardOf              // since
}

// heardOf is who made changes that were heard.
type heardOf struct {
	writer uint32   // of the last one
	by     []string // the programs
}

func newDrift(now time.Time) drift {
	return drift{detector: newDetector(now), alarm: time.NewTimer(compareEvery), due: now.Add(compareEvery)}
}

// unknown is the name of the program if the change was not notified.
const unknown = "unknown"

// names returns which programs changed the rules: more than one if several wrote
// before the check.
func (d *drift) names() string {
	if len(d.by) == 0 {
		return unknown
	}
	return strings.Join(d.by, " or ")
}

// next returns when the loop wakes up without a notification; zero: never.
func (d *drift) next(now time.Time) time.Time {
	next, turns := d.due, d.detector.turns(now)
	if !next.IsZero() && next.Before(d.pace.repairAt) {
		next = d.pace.repairAt
	}
	if next.IsZero() || !turns.IsZero() && turns.Before(next) {
		return turns
	}
	return next
}

// attend starts or stops listening as the detector decides, and sets the alarm.
func (a *Agent) attend() {
	d, now := &a.drift, time.Now()
	switch listen := d.detector.listening(now); {
	case listen && !d.listening:
		a.listen(now)
	case !listen && d.listening:
		a.unlisten(now)
	}
	if next := d.next(now); next.IsZero() {
		d.alarm.Stop()
	} else {
		d.alarm.Reset(next.Sub(now))
	}
}

func (a *Agent) listen(now time.Time) {
	d := &a.drift
	d.due = now // for earlier changes
	err := a.in.Join()
	a.listens(err == nil)
	if err != nil {
		a.cannotListen(now, err)
		return
	}
	d.failing = false
	a.log.Debug("listening to ruleset changes", zap.String("event", "listening_started"))
}

func (a *Agent) unlisten(now time.Time) {
	a.in.Leave()
	a.listens(false)
	a.drift.due = now
}

// listens records whether the agent listens, before that is logged.
func (a *Agent) listens(yes bool) {
	a.drift.listening = yes
	a.health.set(func(s *state) { s.listening = yes })
}

func (a *Agent) cannotListen(now time.Time, err error) {
	a.drift.detector.failed(now)
	if !a.drift.failing {
		a.drift.failing = true
		a.log.Error("cannot subscribe to ruleset changes; polling instead",
			zap.String("event", "listening_failed"), zap.Error(err))
	}
}

// heard handles a notification. Our own transactions are ignored.
func (a *Agent) heard(ctx context.Context, c Heard) {
	d, now := &a.drift, time.Now()
	if c.Err != nil {
		a.unlisten(now)
		a.cannotListen(now, c.Err)
		return
	}
	if c.Writer == a.kernel.PortID() && !c.Overrun {
		return
	}
	by := c.Process
	if c.Overrun {
		by = unknown
	}
	a.log.Debug("ruleset changed", zap.String("event", "ruleset_changed"), zap.String("by", by))
	d.writer, a.survey.by = c.Writer, c.Process
	if by != "" && !slices.Contains(d.by, by) {
		d.by = append(d.by, by)
	}
	if c.Large {
		a.stopListening(now, "a large transaction", by, d.detector.large(now))
	}
	repaired := d.detector.repaired
	d.due = now
	a.compare(ctx)
	if d.listening && d.detector.repaired.Equal(repaired) {
		if length := d.detector.woken(now); length > 0 {
			a.stopListening(now, "too many transactions", by, length)
		}
	}
}

func (a *Agent) stopListening(now time.Time, why, by string, length time.Duration) {
	a.unlisten(now)
	a.log.Info("no longer listening to ruleset changes; polling instead",
		zap.String("event", "listening_stopped"), zap.String("reason", why), zap.String("by", by),
		zap.Float64("duration_seconds", length.Seconds()))
}

// verifyEvery is after how many polls our table itself is read: a table owned by
// a process is deleted with its socket, without a new generation.
const verifyEvery = 40

// compare checks the rules if a check is due and the generation has changed since
// the last one.
func (a *Agent) compare(ctx context.Context) {
	d, now := &a.drift, time.Now()
	if d.due.IsZero() || now.Before(d.due) || now.Before(d.pace.repairAt) {
		return
	}
	d.due = time.Time{}
	if !d.listening {
		d.due = now.Add(compareEvery)
		d.compared++
	}
	generation, err := a.in.Generation()
	switch {
	case err != nil:
		return
	case now.Before(d.pace.checkAt):
		d.due = d.pace.checkAt
		return
	case generation != d.generation:
	case d.compared >= verifyEvery && a.inSync():
		d.compared = 0
		a.sync(ctx, onDrift, layout.Ours)
		return
	default:
		return
	}
	d.generation, a.survey.due = generation, true
	if !d.listening {
		a.survey.by = ""
	}
	a.sync(ctx, onDrift, layout.Ours)
}

// inSync reports whether the rules were correct, or repaired, when last checked.
func (a *Agent) inSync() bool {
	return a.refused == "" && !a.fresh && a.policy.want != nil && a.held == a.policy.want.Hash()
}

// manyCIDRs is the number of CIDRs from which on our own listening makes our
// writes more expensive.
const manyCIDRs = 250

// hugeCIDRs is the number of CIDRs from which on writing them takes so much memory
// that it is returned to the system.
const hugeCIDRs = 10_000

// apply applies the wanted ruleset to the kernel. Memory is returned to the system
// after that took several times as much as is kept.
func (a *Agent) apply(ctx context.Context, depth layout.Depth) (kernel.Applied, error) {
	v4, v6 := a.policy.want.CIDRs()
	if a.drift.listening && v4+v6 >= manyCIDRs {
		a.unlisten(time.Now())
		defer func() { a.listen(time.Now()) }()
	}
	applied, err := a.kernel.Apply(ctx, *a.policy.want, depth)
	if depth > layout.Ours || len(applied.Differences) > 0 && v4+v6 >= hugeCIDRs {
		giveBack()
	}
	return applied, err
}

// checked records that nothing had to be restored, or that it failed.
func (a *Agent) checked(reason string, took time.Duration, err error, generation uint32) {
	d := &a.drift
	if d.generation = generation; err != nil {
		// Our rules may be only partly written.
		d.generation, _ = a.in.Generation()
	}
	if reason == onDrift {
		d.pace.checked(time.Now(), took)
	}
}

// restored records that the rules were restored. When that is logged, the agent
// already listens.
func (a *Agent) restored(generation uint32) {
	d, now := &a.drift, time.Now()
	d.generation = generation
	d.detector.restored(now)
	d.pace.restored(now, d.writer)
	a.attend()
}
