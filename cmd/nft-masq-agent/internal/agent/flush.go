package agent

import (
	"context"

	"go.uber.org/zap"

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
func flush(ctx context.Context, k Kernel, r nft.Ruleset, which config.Stale, log *zap.Logger) {
	if which == config.StaleKeep {
		return
	}
	fields := []zap.Field{zap.String("protocols", string(which)), zap.String("hash", r.Hash())}
	started := false
	run := k.Flush(r, which, func(n int, j *conntrack.Judge) {
		for _, reason := range j.Spared {
			log.Info("some connections are not deleted: which ones contradict the policy is not certain",
				zap.String("event", "stale_connections_spared"), zap.String("reason", reason))
		}
		if started = n > 0; started {
			log.Info("deleting connections that contradict the changed policy",
				append(fields, zap.String("event", "stale_connections_deleting"), zap.Int("connections", n))...)
		}
	})
	deleted, err := run(ctx)
	failed := ""
	for tries := 1; err != nil && ctx.Err() == nil; tries++ {
		if text := err.Error(); text != failed {
			failed = text
			log.Warn("cannot delete connections that contradict the changed policy",
				zap.String("event", "stale_connections_kept"), zap.Error(err))
		}
		if wait(ctx, backoff(tries)) {
			deleted, err = run(ctx)
		}
	}
	if started {
		log.Info("deleted connections that contradict the changed policy",
			append(fields, zap.String("event", "stale_connections_deleted"),
				zap.Int("connections", deleted), zap.Bool("complete", err == nil))...)
	}
}
