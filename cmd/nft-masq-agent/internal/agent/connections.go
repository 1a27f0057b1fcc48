package agent

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// recountEvery is how often stale connections are counted again while there are any,
// unless that would exceed checkShare.
const recountEvery = time.Minute

// connections counts the connections that contradict the rules in the kernel, and deletes
// them if that is configured.
type connections struct {
	*Agent
	stale atomic.Pointer[int] // nil: unknown
}

// effective identifies what is in force: a state of our rules, and what to do with
// connections that contradict it. The zero value is none.
type effective struct {
	changes int
	stale   config.Stale
}

// effective returns what is in force. While that is not certain, it is none.
func (v view) effective() effective {
	switch {
	case !v.inForce():
		return effective{}
	case v.policy.accepted:
		return effective{v.changes, v.policy.content.stale}
	}
	return effective{v.changes, config.StaleKeep}
}

// run calls handle for each state of our rules, with a context that ends when another
// policy is decided, when they are restored, or when they are not known to be in force.
func (o *connections) run(ctx context.Context) {
	var last effective
	var running sync.WaitGroup
	end := func() {}
	o.follow(ctx, func(v view, _ bool) {
		e := v.effective()
		if e == last {
			return
		}
		end()
		running.Wait()
		var this context.Context
		this, end = context.WithCancel(ctx)
		if last = e; e != (effective{}) {
			running.Go(func() { o.handle(this, *v.installed, e.stale) })
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
		stale, err := o.kernel.Stale(ctx, r)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			o.stale.Store(nil)
			o.unreadable(err, &failed)
		default:
			o.stale.Store(&stale.Count)
			if stale.Count == 0 {
				return
			}
			if first {
				o.logStale(stale)
			}
		}
		wait(ctx, max(recountEvery, checkShare*time.Since(start)))
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
	o.logLine(zap.InfoLevel, "stale_connections",
		"existing connections keep an address that contradicts the current rules", fields...)
}

func (o *connections) collect(e exporter) {
	if n := o.stale.Load(); n != nil {
		e.gauge("stale_connections", "Open connections whose translation contradicts the rules. An estimate above "+
			"200,000 tracked connections.",
			float64(*n))
	}
}
