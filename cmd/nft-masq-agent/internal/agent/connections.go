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

// policyChanged triggers counting the stale connections, outside the loop.
func (a *Agent) policyChanged() {
	select {
	case <-a.changedPolicy: // one that was not handled yet
	default:
	}
	a.changedPolicy <- effective{*a.policy.want, a.staleConnections}
}

// effective is a ruleset in the kernel, and what to do with connections that
// contradict it.
type effective struct {
	nft.Ruleset
	stale config.Stale
}

// flush deletes stale connections, and again after one second, for those with a
// packet in flight.
func (a *Agent) flush(ctx context.Context, p effective) error {
	if p.stale == config.StaleKeep {
		return nil
	}
	first, err := a.kernel.Flush(ctx, p.Ruleset, p.stale)
	if err != nil || first == 0 {
		return err
	}
	if !wait(ctx, time.Second) {
		return nil
	}
	second, err := a.kernel.Flush(ctx, p.Ruleset, p.stale)
	a.log.Info("deleted connections that contradict the changed policy",
		zap.String("event", "stale_connections_deleted"), zap.Int("connections", first+second), zap.String("protocols", string(p.stale)))
	return err
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
		var err error
		if changed {
			err = a.flush(ctx, policy)
		}
		start := time.Now()
		var stale conntrack.Stale
		if err == nil {
			stale, err = a.kernel.Stale(ctx, policy.Ruleset)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			a.health.set(func(s *state) { s.stale = nil })
			if text := err.Error(); text != failed {
				failed = text
				a.log.Warn("cannot read connections", zap.String("event", "connections_unreadable"), zap.Error(err))
			}
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
	if s.Partial() {
		fields = append(fields, zap.Int("sampled", s.Examined), zap.Int("tracked", s.Entries))
	}
	if !s.Oldest.IsZero() {
		fields = append(fields, zap.Time("oldest", s.Oldest))
	}
	a.log.Info("existing connections keep an address that contradicts the current rules", fields...)
}
