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

// effective is a ruleset in the kernel, when it was written, and what to do with
// connections that contradict it. The zero value is none.
type effective struct {
	ruleset *nft.Ruleset
	since   time.Time
	stale   config.Stale
}

// effective returns what is in force. While that is not certain, it is none.
func (v view) effective() effective {
	if !v.inForce() {
		return effective{}
	}
	e := effective{v.installed, v.told.Changed, config.StaleKeep}
	if v.policy.accepted {
		e.stale = v.policy.content.stale
	}
	return e
}

// run calls handle for each ruleset that is written, with a context that ends when
// another one is decided, when it is restored, or when it is not known to be in force.
func (o *connections) run(ctx context.Context) {
	var last effective
	var running sync.WaitGroup
	end := func() {}
	o.follow(ctx, func(v view) {
		e := v.effective()
		if e == last {
			return
		}
		end()
		running.Wait()
		var this context.Context
		this, end = context.WithCancel(ctx)
		if last = e; e != (effective{}) {
			running.Go(func() { o.handle(this, e) })
		}
	})
	end()
	running.Wait()
}

// handle deletes and counts stale connections until there are none. Then the table is
// not read again.
func (o *connections) handle(ctx context.Context, e effective) {
	failed := ""
	if err := o.flush(ctx, e); err != nil && ctx.Err() == nil {
		o.unreadable(err, &failed)
	}
	for first := true; ; first = false {
		start := time.Now()
		stale, err := o.kernel.Stale(ctx, *e.ruleset)
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
		if !wait(ctx, max(recountEvery, checkShare*time.Since(start))) {
			return
		}
	}
}

// flush deletes stale connections, and again after one second, for those with a
// packet in flight.
func (o *connections) flush(ctx context.Context, e effective) error {
	if e.stale == config.StaleKeep {
		return nil
	}
	first, err := o.kernel.Flush(ctx, *e.ruleset, e.stale)
	if err != nil || first == 0 || !wait(ctx, time.Second) {
		return err
	}
	second, err := o.kernel.Flush(ctx, *e.ruleset, e.stale)
	o.logLine(zap.InfoLevel, "stale_connections_deleted", "deleted connections that contradict the changed policy", "connections", first+second, "protocols", string(e.stale))
	return err
}

// logStale logs how many connections keep the translation of an earlier policy.
func (o *connections) logStale(s conntrack.Stale) {
	fields := []any{"connections", s.Count}
	if s.Partial() {
		fields = append(fields, "sampled", s.Examined, "tracked", s.Entries)
	}
	if !s.Oldest.IsZero() {
		fields = append(fields, "oldest", s.Oldest)
	}
	o.logLine(zap.InfoLevel, "stale_connections", "existing connections keep an address that contradicts the current rules", fields...)
}

func (o *connections) collect(e exporter) {
	if n := o.stale.Load(); n != nil {
		e.gauge("stale_connections", "Connections decided by an earlier policy, whose translation contradicts the rules. An estimate above 200,000 tracked connections.",
			float64(*n))
	}
}
