package main

import (
	"context"
	"net/netip"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/observe"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/rule"
)

// Everything that looks at the node beside our rules is wired here. Without this file, and the
// commands that look, the rest is an agent: a test removes them.
func init() { //nolint:gochecknoinits // nothing else may name what can be removed
	lookCommands = theLook().commands
	facts.Words = rule.String
	observed = func(ctx context.Context, k *kernel.Kernel, o options.Options) (agent.Kernel, func(*agent.Agent)) {
		host := observe.NewNode(k, o.AcceptForeign)
		here := health.Node{
			Proc: "/proc", Pods: routes.Pods, Interfaces: routes.Interfaces, Stats: conntrack.Open().Stats,
			OnlyNAT: func() (bool, error) { // on another goroutine than the loop
				k := kernel.Open()
				defer func() { _ = k.Close() }()
				return k.OnlyNAT(ctx)
			},
		}
		return host, func(a *agent.Agent) {
			check := func(p nft.Policy) config.Problems { return here.Check(p, o.ConfigPath) }
			a.Observe(observe.All(a, host, o, check)...)
		}
	}
}

// A look is how commands read what there is on this node beside our rules.
type look struct {
	node   func(*kernel.Kernel) *neighbors.Node
	routes func(routes.Query) (routes.Routes, error) // [routes.Lookup]
	pods   func(ipv6 bool) ([]netip.Addr, error)     // [routes.Pods]
}

func theLook() look { return look{node: neighbors.Of, routes: routes.Lookup, pods: routes.Pods} }

// commands returns the commands that look, in the order of the help.
func (l look) commands() []command {
	return []command{
		checkCommand(), diffCommand(l), renderCommand(), statusCommand(l), explainCommand(l), connectionsCommand(l),
	}
}
