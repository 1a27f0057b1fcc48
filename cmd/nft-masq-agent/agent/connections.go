package agent

import (
	"context"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// Stale connections are counted again as long as there are any: once a minute, or
// less often if counting takes more than a two-hundredth of that time.
const (
	recountEvery = time.Minute
	recountShare = 200
)

// policyChanged has the stale connections counted, beside the loop.
func (a *Agent) policyChanged() {
	select {
	case <-a.changedPolicy: // one that was not yet looked at
	default:
	}
	a.changedPolicy <- a.policy.want.Policy
}

// watchConnections counts stale connections after each change of the rules until
// there are none left. A table without any is not read again.
func (a *Agent) watchConnections(ctx context.Context) {
	timer := stoppedTimer()
	defer timer.Stop()
	var policy nft.Policy
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
		start := time.Now()
		stale, err := a.kernel.Stale(policy)
		if err != nil {
			a.health.staleUnknown()
			if text := err.Error(); text != failed {
				failed = text
				a.log.Warn("connections cannot be read", zap.String("event", "connections_unreadable"), zap.Error(err))
			}
			continue
		}
		failed = ""
		a.health.foundStale(stale.Count)
		if changed && stale.Count > 0 {
			a.tellStale(stale)
		}
		timer.Stop()
		if stale.Count > 0 {
			timer.Reset(max(recountEvery, recountShare*time.Since(start)))
		}
	}
}

// tellStale logs how many connections keep a translation of an earlier policy.
func (a *Agent) tellStale(s conntrack.Stale) {
	fields := []zap.Field{zap.String("event", "stale_connections"), zap.Int("connections", s.Count)}
	if s.Part() {
		fields = append(fields, zap.Int("sampled", s.Looked), zap.Int("tracked", s.Entries))
	}
	if !s.Oldest.IsZero() {
		fields = append(fields, zap.Time("oldest", s.Oldest))
	}
	a.log.Info("existing connections keep an address that the present rules would not give them", fields...)
}
