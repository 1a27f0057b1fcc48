//go:build !agentonly

package main

import (
	"context"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/observe"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

// This file links everything that looks at the node beside our rules. With the tag agentonly, and
// without this file and the commands that look, the rest is an agent: a test removes them.

// lookCommands are the commands that look, in the order of the help.
func lookCommands() []command {
	return []command{
		checkCommand(), diffCommand(), renderCommand(), statusCommand(), explainCommand(), connectionsCommand(),
	}
}

// observed returns the kernel for an agent's loop, and what adds observers to the agent.
func observed(ctx context.Context, k *kernel.Kernel, o cli.Options) (agent.Kernel, func(*agent.Agent)) {
	host := observe.Kernel{Kernel: k}
	node := health.Node{Proc: "/proc"} // on another goroutine than the loop
	return host, func(a *agent.Agent) {
		check := func(ctx context.Context, p nft.Policy) config.Problems {
			facts := node.Read(ctx, o.ConfigPath)
			return facts.Problems(p)
		}
		a.Observe(observe.All(a, host, o, check)...)
	}
}
