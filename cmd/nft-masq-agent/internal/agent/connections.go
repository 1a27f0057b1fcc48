package agent

import (
	"context"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// recountEvery is how often stale connections are counted again while there are any,
// unless that would exceed checkShare.
const recountEvery = time.Minute

// policyChanged triggers deleting and counting the stale connections, outside the loop.
func (a *Agent) policyChanged(ctx context.Context) {
	a.policyEnded()
	e := effective{Ruleset: *a.policy.want, stale: a.staleConnections}
	e.ctx, a.endConnections = context.WithCancel(ctx)
	select {
	case <-a.changedPolicy: // one that was not handled yet
	default:
	}
	a.changedPolicy <- e
}

// policyEnded ends at once what is done about connections that contradict a policy. The next
// one that is in the kernel, perhaps the same, begins it again.
func (a *Agent) policyEnded() {
	if a.endConnections != nil {
		a.endConnections()
		a.endConnections = nil
	}
}

// effective is a ruleset in the kernel, and what to do with connections that
// contradict it.
type effective struct {
	nft.Ruleset
	stale config.Stale
	ctx   context.Context // ends with the policy
}

// watchConnections counts stale connections after each change of the rules until
// there are none. Then the table is not read again.
func (a *Agent) watchConnections(ctx context.Context) {
	timer := stoppedTimer()
	defer timer.Stop()
	var policy effective
	failed := ""
	for {
		changed := false
		select {
		case <-ctx.Done():
			return
		case policy = <-a.changedPolicy:
			changed = true
		case <-timer.C:
		}
		if changed {
			a.health.set(func(s *state) { s.stale = nil }) // until they are counted
			flush(policy.ctx, a.kernel, policy.Ruleset, policy.stale, a.log)
		}
		start := time.Now()
		stale, err := a.kernel.Stale(policy.ctx, policy.Ruleset)
		if policy.ctx.Err() != nil {
			continue
		}
		if err != nil {
			a.health.set(func(s *state) { s.stale = nil })
			if text := err.Error(); text != failed {
				failed = text
				a.log.Warn("cannot read connections", zap.String("event", "connections_unreadable"), zap.Error(err))
			}
			timer.Reset(recountEvery)
			continue
		}
		failed = ""
		a.health.set(func(s *state) { s.stale = &stale.Count })
		if changed && stale.Count > 0 {
			a.logStale(stale)
		}
		timer.Stop()
		if stale.Count > 0 {
			timer.Reset(max(recountEvery, checkShare*time.Since(start)))
		}
	}
}

// logStale logs how many connections keep the translation of an earlier policy.
func (a *Agent) logStale(s conntrack.Stale) {
	fields := []zap.Field{zap.String("event", "stale_connections"), zap.Int("connections", s.Count)}
	if s.Partial {
		fields = append(fields, zap.Int("sampled", s.Examined), zap.Int("tracked", s.Entries))
	}
	if !s.Oldest.IsZero() {
		fields = append(fields, zap.Time("oldest", s.Oldest))
	}
	a.log.Info("existing connections keep an address that contradicts the current rules", fields...)
}
