package agent

import (
	"context"
	"time"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
)

// compareEvery is how often the generation of the ruleset is compared. Joining the
// kernel's notifications would be faster, but while any program does that, large
// transactions of all programs take several times as much time and memory.
const compareEvery = 250 * time.Millisecond

// verifyEvery is how often our table itself is read: one that is owned by a process is
// deleted with its socket, without a new generation.
const verifyEvery = 10 * time.Second

// drift detects other programs' changes.
type drift struct {
	pace       pace
	alarm      *time.Ticker
	generation uint32 // of the ruleset, when last checked; 0: check now
	changed    bool   // why it was checked
}

// compare checks the rules if the generation has changed since the last check, and
// after a while in any case.
func (a *Agent) compare(ctx context.Context) {
	d := &a.drift
	generation, err := a.in.Generation()
	switch now := time.Now(); {
	case err != nil:
		return
	case generation != d.generation && !now.Before(d.pace.notBefore):
		d.generation, a.survey.due = generation, true
		d.changed = true
	case generation != d.generation || now.Before(d.pace.verifyAt) || !a.inSync():
		return
	default:
		d.changed = false
	}
	a.sync(ctx, onDrift, layout.Ours)
}

// inSync reports whether the rules were correct, or repaired, when last checked.
func (a *Agent) inSync() bool {
	return a.refused == "" && !a.fresh && a.policy.want != nil && a.held == a.policy.want.Hash()
}

// hugeCIDRs is the number of CIDRs from which on writing them takes so much memory
// that it is returned to the system.
const hugeCIDRs = 10_000

// apply applies the wanted ruleset to the kernel. Memory is returned to the system
// after that took several times as much as is kept.
func (a *Agent) apply(ctx context.Context, depth layout.Depth) (kernel.Applied, error) {
	v4, v6 := a.policy.want.CIDRs()
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
	d.pace.checked(time.Now(), took, reason == onDrift && d.changed)
}
