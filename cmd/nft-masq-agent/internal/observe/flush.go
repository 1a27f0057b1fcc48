package observe

import (
	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
)

// flush runs a pass for rules that came into force, until it is complete or they are not in force any
// more. It logs when the pass begins to delete, when it fails, and when it ends. Of what was in force
// before this agent began, nothing is known: then nothing is deleted.
func (o *connections) flush(p *period, stale config.Stale) {
	if stale == config.StaleKeep || stale == p.flushed {
		return
	}
	if p.previous == nil {
		p.flushed = stale
		if n := p.history.Earlier.Len(); n > 0 {
			o.Log(zap.InfoLevel, "stale_connections_kept_at_start",
				"connections contradict the policy, but this agent does not know which policy was in force before it started: "+
					"it deletes none of them; see nft-masq-agent connections --flush", "connections", n)
		}
		return
	}
	begun := false
	begin := func() {
		if begun {
			return
		}
		begun = true
		o.Log(zap.InfoLevel, "stale_connections_deleting", "deleting connections that the new policy outdates",
			"protocols", string(stale), "hash", p.rules.Hash())
	}
	deleted := 0
	failed := ""
	for tries := 1; ; tries++ {
		n, kept, err := o.host.Flush(p.ctx, *p.previous, p.rules.Policy, stale, begin)
		deleted += n
		if err == nil {
			p.flushed = stale
		}
		if begun && (err == nil || p.ctx.Err() != nil) {
			o.Log(zap.InfoLevel, "stale_connections_deleted", "deleted connections that the new policy outdates", "protocols",
				string(stale), "hash", p.rules.Hash(), "connections", deleted, "kept", kept, "complete", err == nil)
		}
		if err == nil || p.ctx.Err() != nil {
			return
		}
		if text := err.Error(); text != failed {
			failed = text
			o.Log(zap.WarnLevel, "stale_connections_kept", "cannot delete connections that the new policy outdates",
				"error", err)
		}
		agent.Wait(p.ctx, agent.Backoff(tries))
	}
}
