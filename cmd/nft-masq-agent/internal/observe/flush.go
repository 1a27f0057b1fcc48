package observe

import (
	"context"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// A Flush deletes the connections that contradict a ruleset, in one pass over those that
// did so when it began. After an error it is called again, and continues. It returns how
// many it has deleted in all.
type Flush func(context.Context) (deleted int, err error)

// flush runs a pass for a ruleset that was applied, until it is complete or the context
// ends. It logs when the pass begins to delete, when it fails, and when it ends.
func (o *connections) flush(ctx context.Context, r nft.Ruleset, which config.Stale) {
	if which == config.StaleKeep {
		return
	}
	started, failed := false, ""
	run := o.host.Flush(r, which, func(n int, j *conntrack.Judge) {
		for _, reason := range j.Spared {
			o.Log(zap.InfoLevel, "stale_connections_spared",
				"some connections are not deleted, because they may not contradict the policy", "reason", reason)
		}
		if started = n > 0; started {
			o.Log(zap.InfoLevel, "stale_connections_deleting", "deleting connections that contradict the new policy",
				"protocols", string(which), "hash", r.Hash(), "connections", n)
		}
	})
	deleted, err := run(ctx)
	for tries := 1; err != nil && ctx.Err() == nil; tries++ {
		if text := err.Error(); text != failed {
			failed = text
			o.Log(zap.WarnLevel, "stale_connections_kept", "cannot delete connections that contradict the new policy",
				"error", err)
		}
		if agent.Wait(ctx, agent.Backoff(tries)) {
			deleted, err = run(ctx)
		}
	}
	if started {
		o.Log(zap.InfoLevel, "stale_connections_deleted", "deleted connections that contradict the new policy",
			"protocols", string(which), "hash", r.Hash(), "connections", deleted, "complete", err == nil)
	}
}
