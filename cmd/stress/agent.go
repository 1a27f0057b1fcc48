package main

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// startAgent starts the binary in the node's namespace.
func (b *bench) startAgent(mode nft.Mode, args ...string) *agent.Agent {
	args = append([]string{"run", "--config", b.config, "--mode", string(mode), "--enable-ipv6"}, args...)
	a := nfttest.Must(agent.Start(b.top.Node, nfttest.Command(b.binary, args...)))
	b.agents = append(b.agents, a)
	return a
}

// enforced starts an agent with a policy, and waits until it is in the kernel.
func (b *bench) enforced(ctx context.Context, mode nft.Mode, p policy) *agent.Agent {
	b.write(p)
	a := b.startAgent(mode)
	awaitPolicy(ctx, a, p.ruleset[mode])
	return a
}

// change changes the policy, and waits until it is in the kernel.
func (b *bench) change(ctx context.Context, a *agent.Agent, mode nft.Mode, p policy) {
	b.write(p)
	awaitPolicy(ctx, a, p.ruleset[mode])
}

// awaitPolicy waits until the agent logs that the policy is in the kernel.
func awaitPolicy(ctx context.Context, a *agent.Agent, r nft.Ruleset) {
	nfttest.Check(a.Until(ctx, "policy "+r.Hash(), func() bool {
		return a.Latest("config_applied", "rules_in_place", "config_accepted").Text("hash") == r.Hash()
	}))
}

// kill kills the agent, at any point of its work.
func kill(a *agent.Agent) {
	nfttest.Check(a.Kill())
	<-a.Done()
}
