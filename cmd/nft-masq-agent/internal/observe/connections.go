package observe

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// Evidence is gathered when a policy comes into force, then each minute for ten minutes, and then every
// fifteen minutes, unless that would exceed [agent.CheckShare]; SIGHUP asks for it at once.
const (
	gatherSoon  = time.Minute
	soonFor     = 10 * time.Minute
	gatherLater = 15 * time.Minute
)

// connections keeps the evidence about the policy in force, and deletes the connections that a change of
// the policy outdates, if that is configured.
type connections struct {
	*agent.Agent
	host Host

	mu      sync.Mutex
	current *period             // nil: no policy is known to be in force
	last    *conntrack.Evidence // nil: unknown
}

// A period is the time in which the same rules are in force.
type period struct {
	rules    nft.Ruleset
	changes  int
	previous *nft.Policy // that was in force right before; nil: it is not known

	noted   bool // the connections that contradicted them at first were read, or that failed: later it is too late
	history conntrack.History
	flushed config.Stale // outdated connections that were deleted
	told
}

// effective identifies what is in force: a state of our rules, and what to do with
// connections that contradict it. SIGHUP begins it again. The zero value is none.
type effective struct {
	changes, hangups int
	stale            config.Stale
}

// effectiveOf returns what is in force. While that is not certain, it is none.
func effectiveOf(v agent.View) effective {
	switch {
	case !v.InForce:
		return effective{}
	case v.Accepted:
		return effective{v.Changes, v.Hangups, v.Stale}
	}
	return effective{v.Changes, v.Hangups, config.StaleKeep}
}

// Run calls handle for each state of our rules, with a context that ends when another
// policy is decided, when they are restored, or when they are not known to be in force.
func (o *connections) Run(ctx context.Context) {
	var last effective
	var running sync.WaitGroup
	var current *period
	end := func() {}
	o.EachView(ctx, func(v agent.View, _ bool) {
		e := effectiveOf(v)
		if e == last {
			return
		}
		end()
		running.Wait()
		last = e
		o.begin(nil)
		if e == (effective{}) {
			return
		}
		if current == nil || current.changes != v.Changes {
			current = newPeriod(v)
		}
		var this context.Context
		this, end = context.WithCancel(ctx)
		running.Go(func() { o.handle(this, current, e.stale) })
	})
	end()
	running.Wait()
}

func newPeriod(v agent.View) *period {
	p := &period{
		rules: *v.Installed, changes: v.Changes, flushed: config.StaleKeep,
		history: conntrack.History{Hash: v.Installed.Hash(), Since: time.Now(), AtStart: v.Replaced == nil},
		told:    newTold(),
	}
	if v.Replaced != nil && !v.Replaced.Same(*v.Installed) { // otherwise rules were restored
		p.previous = &v.Replaced.Policy
	}
	return p
}

// begin begins a period. What is known of an earlier one is forgotten.
func (o *connections) begin(p *period) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.current = p
	o.last = nil // until it is gathered
}

// handle notes which connections contradict the rules, deletes those that are outdated, and gathers
// evidence again and again.
func (o *connections) handle(ctx context.Context, p *period, stale config.Stale) {
	o.note(ctx, p)
	o.begin(p)
	o.flush(ctx, p, stale)
	var failed failure
	for ctx.Err() == nil {
		start := time.Now()
		e, err := o.host.Gather(ctx, p.rules.Policy, p.history)
		if ctx.Err() != nil {
			return
		}
		failed.log(o.Agent, "connections_unreadable", "cannot read connections", err)
		if err != nil {
			o.begin(p) // what was known may not be true any more
		} else {
			o.keep(p, e)
		}
		pause := gatherLater
		if time.Since(p.history.Since) < soonFor {
			pause = gatherSoon
		}
		agent.Wait(ctx, max(pause, agent.CheckShare*time.Since(start)))
	}
}

// note notes the connections that contradict the rules, unless that is known. If it fails, it is not
// known of any when it began.
func (o *connections) note(ctx context.Context, p *period) {
	if p.noted {
		return
	}
	earlier, full, err := o.host.Note(ctx, p.rules.Policy)
	if err == nil {
		p.history.Earlier = earlier
		p.history.Incomplete = full
	}
	p.noted = ctx.Err() == nil
}

// keep logs what evidence shows, and keeps it for the metrics.
func (o *connections) keep(p *period, e conntrack.Evidence) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p.tell(o.Agent, e)
	o.last = &e
}

// serveHistory tells a command which connections contradicted the policy when it came into force, and which entries
// were overruled recently.
func (o *connections) serveHistory(w http.ResponseWriter, _ *http.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.current == nil {
		http.Error(w, "no policy is known to be in force", http.StatusServiceUnavailable)
		return
	}
	history := o.current.history
	history.Recent = o.current.recent()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(history)
}

// Collect implements [agent.Observer].
func (o *connections) Collect(e agent.Exporter) {
	stats, err := o.host.Stats()
	if err == nil {
		exportStats(e, stats)
	}
	o.mu.Lock()
	last := o.last
	o.mu.Unlock()
	if last != nil {
		export(e, *last)
	}
}
