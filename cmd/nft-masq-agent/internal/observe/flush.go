package observe

import (
	"context"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
)

// flush runs a pass for rules that came into force, until it is complete or they are not in force any
// more. It logs when the pass begins, when it fails, and when it ends. Of what was in force
// before this agent began, nothing is known: then nothing is deleted.
func (o *connections) flush(ctx context.Context, p *period, stale config.Stale) {
	if stale == config.StaleKeep || stale == p.flushed || p.previous == nil {
		return
	}
	o.Log(zap.InfoLevel, "stale_connections_deleting", "deleting connections that the new policy outdates",
		"protocols", string(stale), "hash", p.rules.Hash())
	deleted := 0
	var failed failure
	for tries := 1; ; tries++ {
		n, err := o.host.Flush(ctx, *p.previous, p.rules.Policy, stale)
		deleted += n
		if err == nil {
			p.flushed = stale
		}
		if err == nil || ctx.Err() != nil {
			o.Log(zap.InfoLevel, "stale_connections_deleted", "deleted connections that the new policy outdates", "protocols",
				string(stale), "hash", p.rules.Hash(), "connections", deleted, "complete", err == nil)
			return
		}
		failed.log(o.Agent, "stale_connections_kept", "cannot delete connections that the new policy outdates", err)
		agent.Wait(ctx, agent.Backoff(tries))
	}
}
