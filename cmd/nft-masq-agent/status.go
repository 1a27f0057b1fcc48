package main

import (
	"context"
	"errors"
	"flag"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/node"
)

type statusFlags struct {
	*options.Options
	set    *flag.FlagSet
	output string
}

func statusCommand() command {
	return command{
		name:  "status",
		about: "compare the kernel with the config; what is wrong on this node comes first",
		details: "It lists each difference, counts connections, and names other programs' rules on this node that interfere. " +
			"Without policy flags it uses those of the running agent. Exit code 0 means that the kernel is in sync with a " +
			"valid config. Nothing is written.",
		examples: []string{
			program + " status",
			"kubectl exec -n kube-system nft-masq-agent-abcde -- /nft-masq-agent status",
		},
		flags: func(fs *flag.FlagSet) action {
			f := statusFlags{Options: options.AddPolicyFlags(fs), set: fs}
			f.AddPodCIDRs(fs)
			f.AddAcceptForeign(fs)
			addOutput(fs, &f.output)
			return func(ctx context.Context, _ []string, e environment) (int, error) { return f.status(ctx, e) }
		},
	}
}

func (f *statusFlags) status(ctx context.Context, e environment) (int, error) {
	agents := running.Agents(e.proc, program)
	pods, accept := f.PodCIDRs, f.AcceptForeign
	r := answer.Status{Agent: running.Follow(f.Options, f.set, agents), Agents: running.Reached(agents)}
	if pods != nil {
		f.PodCIDRs = pods
	}
	if accept != nil {
		f.AcceptForeign = accept
	}
	l, err := f.Load()
	r.SetConfig(*f.Options, l, err)
	for _, line := range legacyIPTables(e.proc) {
		r.Add(config.Warning, "older-agent", "%s", line)
	}
	candidates, candidatesErr := e.candidates(f.Options, l, err)
	if candidatesErr != nil {
		return exitFailed, candidatesErr
	}
	built := l.Ruleset
	l = options.Loaded{} // the config, which may be long
	k := e.kernel()
	defer func() { _ = k.Close() }()
	if err := askKernel(ctx, &r, k, *f.Options, candidates); err != nil {
		return exitFailed, hinted(err)
	}
	if !r.Config.Accepted {
		r.SetEnforced(*f.Options, built)
	}
	for _, ipv6 := range []bool{false, true} {
		if text := legacyNAT(e.proc, ipv6); text != "" {
			r.Add(config.Warning, "legacy-tables", "The checks ignore %s", text)
		}
	}
	r.Conclude()
	if err := e.reply(f.output, r, r.String); err != nil || len(r.Problems.Faults()) > 0 {
		return exitFailed, err
	}
	return exitDone, nil
}

// askKernel adds the report on the kernel.
func askKernel(
	ctx context.Context, r *answer.Status, k *kernel.Kernel, o options.Options, of candidates,
) error {
	r.Kernel.Differences = []string{}
	foreign := k.Check(ctx, o.NFT().Layout)
	if foreign != nil && !errors.Is(foreign, nft.ErrForeignChain) {
		return foreign
	}
	now, err := of.inForce(ctx, k)
	if err != nil {
		return err
	}
	if r.Config.Accepted && foreign == nil {
		diffs, err := k.Diff(ctx, of.rulesets[0], layout.Everything)
		if err != nil {
			return err
		}
		r.Kernel.Differences = append(r.Kernel.Differences, diffs...)
		r.Kernel.InSync = len(diffs) == 0
	}
	counted := o.NFT().Layout
	if now.found {
		counted = now.Layout
		r.Kernel.Mode, r.Kernel.Hash = string(counted.Mode()), now.Hash
	}
	if foreign != nil {
		// Neither its rules nor their counters are ours.
		r.Kernel.Differences = append(r.Kernel.Differences, foreign.Error())
		r.SetConnections(nil)
		r.SetOthers(kernel.Others{})
		return nil
	}
	counts, err := k.Counters(counted)
	if err != nil {
		return err
	}
	r.SetConnections(counts)
	want := nft.Ruleset{Layout: counted}
	switch {
	case now.known != nil:
		want = *now.known
	case r.Config.Accepted:
		want = of.rulesets[0]
	}
	if err := askOthers(ctx, r, k, o, want); err != nil {
		return err
	}
	switch {
	case now.known != nil:
		askStale(ctx, r, k, now.known.Policy)
	case now.found:
		r.Add(config.Note, "stale-unknown", "%s: which connections are stale is unknown.", now.unknown)
	}
	return nil
}

// askOthers adds the report on other programs' rules and on this node, of which the policy is
// wanted.
func askOthers(ctx context.Context, r *answer.Status, k *kernel.Kernel, o options.Options, want nft.Ruleset) error {
	r.SNAT = answer.NodeSNAT(want.Policy)
	others, err := k.Others(ctx, want)
	if err != nil {
		return err
	}
	others.Accept(o.AcceptForeign)
	r.SetOthers(others)
	links, err := node.Interfaces()
	if err != nil {
		return err
	}
	r.Problems = append(r.Problems, answer.Interfaces(want.Policy.AbsentInterfaces(links))...)
	for _, p := range answer.UncoveredPods(want.Policy, o.PodCIDRs) {
		p.Level = config.Error // here: check warns of what may be meant
		r.Problems = append(r.Problems, p)
	}
	return nil
}

// askStale adds the report on connections that contradict the policy in the kernel.
func askStale(ctx context.Context, r *answer.Status, k *kernel.Kernel, policy nft.Policy) {
	j, err := judgeBy(ctx, k, policy)
	var stale conntrack.Stale
	if err == nil {
		stale, err = conntrack.Open().CountStale(j)
	}
	if err != nil {
		r.Add(config.Warning, "stale-unknown", "cannot count stale connections: %v", err)
		return
	}
	r.SetStale(stale)
}
