package main

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// startAgent starts the binary in the node's namespace.
func (b *bench) startAgent(mode nft.Mode, args ...string) (*agent.Agent, error) {
	a, err := agent.Start(b.top.Node,
		nfttest.Command(b.binary, append([]string{"run", "--config", b.config, "--mode", string(mode)}, args...)...))
	if err == nil {
		b.agents = append(b.agents, a)
	}
	return a, err
}

// awaitPolicy waits until the agent logs that the policy is in the kernel.
func awaitPolicy(ctx context.Context, a *agent.Agent, r nft.Ruleset) error {
	return a.Until(ctx, "policy "+r.Hash(), func() bool {
		return a.Latest("config_applied", "rules_in_place", "config_accepted").Text("hash") == r.Hash()
	})
}

// restores returns how often the agent has logged that it restored the rules.
func restores(a *agent.Agent) int { return a.Count("rules_restored") }

// restoresAfter waits until the agent has restored the rules more often than before.
func restoresAfter(ctx context.Context, a *agent.Agent, attack string, before int) error {
	return a.Until(ctx, "rules restored after: "+attack, func() bool { return restores(a) > before })
}

// kill kills the agent, at any point of its work.
func kill(a *agent.Agent) error {
	err := a.Kill()
	<-a.Done()
	return err
}
