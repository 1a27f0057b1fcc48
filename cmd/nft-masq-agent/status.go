package main

import (
	"context"
	"flag"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft/conntrack"
)

func statusCommand() command {
	return command{
		name:  "status",
		about: "compare the kernel with the config, and list what is wrong on this node, the most serious first",
		details: "It lists each difference, counts connections, and compares open connections with the policy. Flags that " +
			"are not given are those of the running agent. Exit code 0 means that the kernel is in sync with a valid config, " +
			"and that nothing needs attention. Nothing is written.",
		examples: []string{
			program + " status",
			"kubectl exec -n kube-system nft-masq-agent-abcde -- /nft-masq-agent status",
		},
		flags: func(fs *flag.FlagSet) action {
			return addNodeFlags(fs).status
		},
	}
}

func (f *nodeFlags) status(ctx context.Context, _ []string, e environment) (int, error) {
	s, err := f.open(e)
	if err != nil {
		return exitFailed, err
	}
	facts, err := s.gather(ctx)
	if err != nil {
		return exitFailed, err
	}
	r := answer.NewStatus(facts)
	return e.reply(f.output, &r)
}

// gather reads everything that the report is made of.
func (s *session) gather(ctx context.Context) (answer.StatusFacts, error) {
	f := answer.StatusFacts{
		Head: s.head(), Files: s.files(), Agent: s.runningAgent(), TakeOver: s.TakeOver,
		Verbose: s.Verbosity > 0,
	}
	current, err := s.inForce(ctx)
	if err != nil {
		return f, err
	}
	f.Config = s.config(current)
	f.Unknown = current.unknown
	f.Policy = current.state.Want.Policy
	if current.known != nil {
		f.InForce = true
		f.Policy = current.known.Want.Policy
	}
	installed := current.state.Want.Layout
	if s.rejected == nil {
		for _, d := range current.state.Differences() {
			f.Kernel.Differences = append(f.Kernel.Differences, d.String())
		}
		f.Kernel.InSync = len(f.Kernel.Differences) == 0
	}
	if current.found {
		installed = current.Layout
		f.Kernel.Mode = string(installed.Mode())
		f.Kernel.Hash = current.Hash
	}
	f.Counts, err = s.kernel.Counters(installed)
	if err != nil {
		return f, err
	}
	f.Older, err = s.kernel.Older(ctx, current.state.Want)
	if err != nil {
		return f, err
	}
	node := health.Node{Proc: s.proc}
	f.Health = node.Read(ctx, s.ConfigPath)
	if f.InForce {
		s.gatherConnections(ctx, &f)
	}
	return f, nil
}

// runningAgent returns what is known of the agent that runs here, whether or not it has a
// socket or answers there; nil if there is none.
func (s *session) runningAgent() *running.Report {
	if s.agent != nil {
		return s.agent
	}
	r := running.Report{PID: running.Hidden, Alive: s.stuck}
	pid, found := running.Agent()
	if !found && s.stuck == "" {
		return nil
	}
	if found {
		r.PID = pid
	}
	latecomer, second := running.Announced()
	if second && latecomer != pid {
		r.SecondAgent = latecomer
	}
	return &r
}

// gatherConnections compares open connections with the policy in force.
func (s *session) gatherConnections(ctx context.Context, f *answer.StatusFacts) {
	history := s.history(f.Policy)
	evidence, err := conntrack.ReadEvidence(ctx, f.Policy, history)
	f.Health.CannotRead("connections", err)
	if err != nil {
		return
	}
	f.Evidence = &evidence
	f.Recent = history.Recent
}
