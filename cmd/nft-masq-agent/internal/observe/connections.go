package observe

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// recountEvery is how often stale connections are counted again while there are any,
// unless that would exceed [agent.CheckShare].
const recountEvery = time.Minute

// connections counts the connections that contradict the rules in the kernel, and deletes
// them if that is configured.
type connections struct {
	*agent.Agent
	host  Host
	stale atomic.Pointer[int] // nil: unknown
}

// effective identifies what is in force: a state of our rules, and what to do with
// connections that contradict it. The zero value is none.
type effective struct {
	changes int
	stale   config.Stale
}

// effectiveOf returns what is in force. While that is not certain, it is none.
func effectiveOf(v agent.View) effective {
	switch {
	case !v.InForce:
		return effective{}
	case v.Accepted:
		return effective{v.Changes, v.Stale}
	}
	return effective{v.Changes, config.StaleKeep}
}

// run calls handle for each state of our rules, with a context that ends when another
// policy is decided, when they are restored, or when they are not known to be in force.
func (o *connections) Run(ctx context.Context) {
	var last effective
	var running sync.WaitGroup
	end := func() {}
	o.Follow(ctx, func(v agent.View, _ bool) {
		e := effectiveOf(v)
		if e == last {
			return
		}
		end()
		running.Wait()
		var this context.Context
		this, end = context.WithCancel(ctx)
		if last = e; e != (effective{}) {
			running.Go(func() { o.handle(this, *v.Installed, e.stale) })
		}
	})
	end()
	running.Wait()
}

// handle deletes and counts stale connections until there are none. Then the table is
// not read again.
func (o *connections) handle(ctx context.Context, r nft.Ruleset, which config.Stale) {
	o.stale.Store(nil) // until they are counted
	o.flush(ctx, r, which)
	failed := ""
	for first := true; ctx.Err() == nil; first = false {
		start := time.Now()
		stale, err := o.host.Stale(ctx, r)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			o.stale.Store(nil)
			unreadable(o.Agent, err, &failed)
		default:
			o.stale.Store(&stale.Count)
			if stale.Count == 0 {
				return
			}
			if first {
				o.logStale(stale)
			}
		}
		agent.Wait(ctx, max(recountEvery, agent.CheckShare*time.Since(start)))
	}
}

// logStale logs how many connections keep the translation of an earlier policy.
func (o *connections) logStale(s conntrack.Stale) {
	fields := []any{"connections", s.Count}
	if s.Partial {
		fields = append(fields, "sampled", s.Examined, "tracked", s.Entries)
	}
	if !s.Oldest.IsZero() {
		fields = append(fields, "oldest", s.Oldest)
	}
	o.Log(zap.InfoLevel, "stale_connections",
		"existing connections keep an address that contradicts the current rules", fields...)
}

func (o *connections) Collect(e agent.Exporter) {
	if n := o.stale.Load(); n != nil {
		e.Gauge("stale_connections", "Open connections whose translation contradicts the rules. An estimate above "+
			"200,000 tracked connections.",
			float64(*n))
	}
}
