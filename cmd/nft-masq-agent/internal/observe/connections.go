package observe

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// Evidence is gathered when a policy comes into force, then each minute for ten minutes, and then every
// fifteen minutes, unless that would exceed [agent.CheckShare]; SIGHUP and commands ask for it at once.
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
	pass chan struct{} // has one element while a pass runs
	wake chan struct{} // has one element if evidence is to be gathered at once

	mu      sync.Mutex
	current *period             // nil: no policy is known to be in force
	last    *conntrack.Evidence // nil: unknown
	told    told
}

// A period is the time in which the same rules are in force.
type period struct {
	ctx     context.Context // ends when they are not known to be in force
	rules   nft.Ruleset
	changes int
	repairs int

	previous *nft.Policy       // that was in force right before; nil: it is not known
	earlier  conntrack.History // of that policy
	missing  bool              // rules were missing, and were restored

	noted   bool // it is known which connections contradicted them at first
	history conntrack.History
	flushed config.Stale // outdated connections that were deleted
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

// Run calls handle for each state of our rules, with a context that ends when another
// policy is decided, when they are restored, or when they are not known to be in force.
func (o *connections) Run(ctx context.Context) {
	var last effective
	var running sync.WaitGroup
	var previous *period
	hangups := 0
	end := func() {}
	o.Follow(ctx, func(v agent.View, _ bool) {
		if v.Hangups != hangups {
			hangups = v.Hangups
			select {
			case o.wake <- struct{}{}:
			default:
			}
		}
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
		var this context.Context
		this, end = context.WithCancel(ctx)
		if previous == nil || previous.changes != v.Changes {
			previous = newPeriod(v, previous)
		}
		current := previous
		current.ctx = this
		running.Go(func() { o.handle(current, e.stale) })
	})
	end()
	running.Wait()
}

func newPeriod(v agent.View, previous *period) *period {
	p := &period{
		rules: *v.Installed, changes: v.Changes, repairs: v.Repairs, flushed: config.StaleKeep,
		history: conntrack.History{Hash: v.Installed.Hash(), Since: time.Now()},
	}
	if v.Replaced != nil {
		p.previous = &v.Replaced.Policy
	}
	if previous == nil {
		return p
	}
	p.missing = v.Repairs != previous.repairs
	if previous.changes == v.Changes-1 { // a policy that is replaced within milliseconds has no history
		p.earlier = previous.history
	}
	return p
}

// begin begins a period. What is known of an earlier one is forgotten.
func (o *connections) begin(p *period) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if p == nil || o.told.changes != p.changes {
		o.last = nil // until it is gathered
	}
	if p != nil && o.told.changes != p.changes {
		o.told = told{changes: p.changes}
	}
	o.current = p
}

// handle notes which connections contradict the rules, deletes those that are outdated, and gathers
// evidence again and again.
func (o *connections) handle(p *period, stale config.Stale) {
	o.note(p)
	o.begin(p)
	o.flush(p, stale)
	for failed := ""; p.ctx.Err() == nil; {
		start := time.Now()
		_, err := o.gather(p.ctx)
		if p.ctx.Err() != nil {
			return
		}
		if err != nil {
			o.forget()
			unreadable(o.Agent, err, &failed)
		} else {
			failed = ""
		}
		pause := gatherLater
		if time.Since(p.history.Since) < soonFor {
			pause = gatherSoon
		}
		o.wait(p.ctx, max(pause, agent.CheckShare*time.Since(start)))
	}
}

// wait waits until it is time to gather evidence again, or SIGHUP asks for it.
func (o *connections) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-o.wake:
	case <-ctx.Done():
	}
}

// note notes the connections that contradict the rules, unless that is known. If it fails, it is not
// known of any when it began.
func (o *connections) note(p *period) {
	if p.noted {
		return
	}
	noted, err := o.host.Note(p.ctx, p)
	if err == nil {
		p.history.Earlier = noted
	}
	p.noted = p.ctx.Err() == nil
}

func (o *connections) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = nil
}

// errNoPolicy is why there is no evidence.
var errNoPolicy = errors.New("no policy is known to be in force")

// gather gathers evidence about what is in force. It waits for another pass, and ends with what is in
// force.
func (o *connections) gather(ctx context.Context, questions ...conntrack.Question) (conntrack.Evidence, error) {
	select {
	case o.pass <- struct{}{}:
	case <-ctx.Done():
		return conntrack.Evidence{}, ctx.Err()
	}
	defer func() { <-o.pass }()
	o.mu.Lock()
	p := o.current
	o.mu.Unlock()
	if p == nil {
		return conntrack.Evidence{}, errNoPolicy
	}
	this, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	e, err := o.host.Gather(this, p.rules.Policy, p.history, questions...)
	if err != nil {
		return e, err
	}
	e.Hash = p.rules.Hash()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.current != p {
		return e, errNoPolicy
	}
	o.told.tell(o.Agent, e)
	e.Recent = o.told.recent()
	o.last = &e
	return e, nil
}

// serveEvidence gathers evidence for a command, and answers its questions.
func (o *connections) serveEvidence(w http.ResponseWriter, r *http.Request) {
	questions, err := conntrack.ParseQuestions(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e, err := o.gather(r.Context(), questions...)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	write(w, e)
}

// serveHistory tells a command which connections contradicted the policy when it came into force.
func (o *connections) serveHistory(w http.ResponseWriter, _ *http.Request) {
	o.mu.Lock()
	p := o.current
	o.mu.Unlock()
	if p == nil {
		http.Error(w, errNoPolicy.Error(), http.StatusServiceUnavailable)
		return
	}
	write(w, p.history)
}

func write(w http.ResponseWriter, answer any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// Collect implements [agent.Observer].
func (o *connections) Collect(e agent.Exporter) {
	o.mu.Lock()
	last := o.last
	o.mu.Unlock()
	if last != nil {
		export(e, *last)
	}
}
