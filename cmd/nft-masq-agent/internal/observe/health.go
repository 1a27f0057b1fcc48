package observe

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// nodeHealth reports what keeps the policy from having an effect on the node, or in force. It looks
// at the node when the policy is another one, and when everything is checked.
type nodeHealth struct {
	*agent.Agent
	check   func(context.Context, nft.Policy) config.Problems
	policy  *nft.Ruleset // that the node was checked for
	repairs int          // at the last view

	mu       sync.Mutex
	restored []time.Time // within a minute
	found    config.Problems
	checked  bool
}

func (o *nodeHealth) Run(ctx context.Context) {
	o.EachView(ctx, func(v agent.View, checked bool) {
		o.countRepairs(v)
		if v.Installed != nil && !v.Pending && (checked || v.Installed != o.policy) {
			o.policy = v.Installed
			o.checkNode(ctx, v)
		}
	})
}

// countRepairs remembers when rules were restored.
func (o *nodeHealth) countRepairs(v agent.View) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for ; o.repairs < v.Repairs; o.repairs++ {
		o.restored = append(o.restored, time.Now())
	}
}

// checkNode checks the node, and logs what is new. If another policy is
// decided meanwhile, it ends, and is done again for that.
func (o *nodeHealth) checkNode(ctx context.Context, v agent.View) {
	ctx, end := o.WithPolicy(ctx, v)
	defer end()
	found := o.check(ctx, v.Installed.Policy)
	if ctx.Err() != nil {
		o.policy = nil
		return
	}
	o.mu.Lock()
	earlier := o.found
	o.found = found
	o.checked = true
	o.mu.Unlock()
	for _, p := range found.Faults() {
		if !contains(earlier, p.ID) {
			o.Log(zap.WarnLevel, "node_problem", "the policy may have no effect on this node", "problem", p.ID, "why",
				p.Error())
		}
	}
}

// contains reports whether problems have one with an ID.
func contains(problems config.Problems, id string) bool {
	return slices.ContainsFunc(problems, func(p config.Problem) bool { return p.ID == id })
}

// recentProblems returns a problem if rules were restored more than twice within a minute. A command cannot find it.
func (o *nodeHealth) recentProblems() config.Problems {
	const limit, window = 2, time.Minute
	o.mu.Lock()
	defer o.mu.Unlock()
	o.restored = slices.DeleteFunc(o.restored, func(moment time.Time) bool { return time.Since(moment) > window })
	n := len(o.restored)
	if n <= limit {
		return nil
	}
	return config.Problems{{
		ID: "rules-restored", Level: config.Error,
		Msg:     fmt.Sprintf("another program keeps changing the rules: restored %d times in the last minute", n),
		Details: "nft monitor shows which program it is",
	}}
}

func (o *nodeHealth) Collect(e agent.Exporter) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.checked {
		return
	}
	for _, id := range health.IDs {
		e.Gauge("node_problem", "Whether something keeps the policy from having an effect on this node, by problem: 1 or 0. "+
			"status says what to do.", agent.Number(contains(o.found, id)), "problem", id)
	}
}
