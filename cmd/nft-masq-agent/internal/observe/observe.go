// Package observe is what the daemon reports beyond its own rules: those of older agents, the
// connections that are evidence about the policy, and problems of the node. An observer
// follows the loop of package agent, which does not know of it: none is needed to keep the rules.
package observe

import (
	"context"
	"fmt"
	"net/http"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// HistoryPath is the path on the agent's socket of the [conntrack.History] of the policy in force, as JSON.
const HistoryPath = "/history"

// All returns the observers of an agent.
func All(
	a *agent.Agent, h Host, o cli.Options, check func(context.Context, nft.Policy) config.Problems,
) []agent.Observer {
	healthy := &nodeHealth{Agent: a, check: check}
	a.SetProblems(healthy.recentProblems)
	evidence := &connections{Agent: a, host: h}
	a.ServeOnSocket("GET "+HistoryPath, http.HandlerFunc(evidence.serveHistory))
	return []agent.Observer{
		&olderAgents{Agent: a, host: h, o: o}, evidence, healthy,
	}
}

// A failure is the text of the last error.
type failure string

// log logs an error, nil for none, once until it changes.
func (f *failure) log(a *agent.Agent, event, text string, err error) {
	last := *f
	*f = failure(fmt.Sprint(err))
	if err != nil && *f != last {
		a.Log(zap.WarnLevel, event, text, "error", err)
	}
}
