//go:build agentonly

package main

import (
	"context"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/kernel"
)

// lookCommands are none: nothing is linked that looks at the node beside our rules.
func lookCommands() []command { return nil }

func observed(_ context.Context, k *kernel.Kernel, _ cli.Options) (agent.Kernel, func(*agent.Agent)) {
	return k, func(*agent.Agent) {}
}
