//go:build agentonly

package main

import (
	"context"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/kernel"
)

// wired links nothing that looks at the node beside our rules.
func wired() wiring {
	return wiring{
		observe: func(_ context.Context, k *kernel.Kernel, _ cli.Options) (agent.Kernel, func(*agent.Agent)) {
			return k, func(*agent.Agent) {}
		},
	}
}
