package observe

import (
	"context"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
)

// A Flush deletes the connections that a change of the policy outdates, in one pass over those that it
// did when the pass began. After an error it is called again, and continues. It returns how many it has
// deleted in all, and how many the kernel kept.
type Flush func(context.Context) (deleted, kept int, err error)

// flush runs a pass for rules that came into force, until it is complete or they are not in force any
// more. It logs when the pass begins to delete, when it fails, and when it ends. Of what was in force
// before this agent began, nothing is known: then nothing is deleted.
func (o *connections) flush(p *period, which config.Stale) {
	if which == config.StaleKeep || which == p.flushed {
		return
	}
	n := len(p.past.policies)
	if n == 0 {
		p.flushed = which
		if n := p.history.Earlier.Len(); n > 0 {
			o.Log(zap.InfoLevel, "stale_connections_kept_at_start",
				"connections contradict the policy, but this agent does not know which policy was in force before it started: "+
					"it deletes none of them; see nft-masq-agent connections --flush", "connections", n)
		}
		return
	}
	started, failed := false, ""
	run := o.host.Flush(p.past.policies[n-1], p.rules.Policy, which, func(n int) {
		if started = n > 0; started {
			o.Log(zap.InfoLevel, "stale_connections_deleting", "deleting connections that the new policy outdates",
				"protocols", string(which), "hash", p.rules.Hash(), "connections", n)
		}
	})
	deleted, kept, err := run(p.ctx)
	for tries := 1; err != nil && p.ctx.Err() == nil; tries++ {
		if text := err.Error(); text != failed {
			failed = text
			o.Log(zap.WarnLevel, "stale_connections_kept", "cannot delete connections that the new policy outdates",
				"error", err)
		}
		if agent.Wait(p.ctx, agent.Backoff(tries)) {
			deleted, kept, err = run(p.ctx)
		}
	}
	if err == nil {
		p.flushed = which
	}
	if started {
		o.Log(zap.InfoLevel, "stale_connections_deleted", "deleted connections that the new policy outdates",
			"protocols", string(which), "hash", p.rules.Hash(), "connections", deleted, "kept", kept, "complete", err == nil)
	}
}
