package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/routes"
)

func statusCommand(l look) command {
	return command{
		name:  "status",
		about: "compare the kernel with the config, and list what is wrong on this node, the most serious first",
		details: "It lists each difference, counts connections, and names other programs' rules on this node that " +
			"interfere. Flags that are not given are those of the running agent. Exit code 0 means that the kernel is in " +
			"sync with a valid config, and that nothing needs attention. Nothing is written.",
		examples: []string{
			program + " status",
			"kubectl exec -n kube-system nft-masq-agent-abcde -- /nft-masq-agent status",
		},
		flags: func(fs *flag.FlagSet) action {
			f := addNodeFlags(fs)
			f.AddPodCIDRs(fs)
			f.AddAcceptForeign(fs)
			return func(ctx context.Context, _ []string, e environment) (int, error) {
				return lookFlags{f, l}.status(ctx, e)
			}
		},
	}
}

func (f lookFlags) status(ctx context.Context, e environment) (int, error) {
	s, err := f.open(e)
	defer func() { _ = s.kernel.Close() }()
	if err != nil {
		return exitFailed, err
	}
	var r answer.Status
	if err := s.consistently(func() (err error) { r, err = s.report(ctx); return err }); err != nil {
		return exitFailed, err
	}
	return e.reply(f.output, &r)
}

func (s *session) report(ctx context.Context) (answer.Status, error) {
	r := answer.NewStatus(s.head(), *s.Options, s.Loaded, s.rejected)
	if a, found := s.runningAgent(); found {
		r.SetAgent(a)
	}
	for _, line := range legacyIPTables(s.proc) {
		r.Add(config.Error, "older-agent", "%s", line)
	}
	if err := s.compare(ctx, &r); err != nil {
		return r, err
	}
	r.Conclude(*s.Options, s.Ruleset, s.others)
	return r, nil
}

func (s *session) compare(ctx context.Context, r *answer.Status) error {
	now, err := s.inForce(ctx)
	if err != nil {
		return err
	}
	if err := now.state.Foreign(); err != nil {
		// Neither its rules nor their counters are ours.
		r.Kernel.Differences = append(r.Kernel.Differences, err.Error())
		return nil
	}
	if s.rejected == nil {
		for _, d := range now.state.Drift() {
			r.Kernel.Differences = append(r.Kernel.Differences, d.String())
		}
		r.Kernel.InSync = len(r.Kernel.Differences) == 0
	}
	l := now.state.Want.Layout
	if now.found {
		l = now.Layout
		r.Kernel.Mode, r.Kernel.Hash = string(l.Mode()), now.Hash
	}
	counts, err := s.kernel.Counters(l)
	if err != nil {
		return err
	}
	r.SetConnections(counts)
	state := cmp.Or(now.known, now.state)
	if err := s.examine(ctx, r, state); err != nil {
		return err
	}
	here := s.health(ctx)
	found := here.Check(state.Want.Policy, s.ConfigPath)
	if !s.Missing {
		found = slices.DeleteFunc(found, func(p config.Problem) bool { return p.ID == health.OtherFile })
	}
	r.Take(found)
	r.SetForwards(here.Forwards(state.Want.Policy))
	if now.known != nil {
		countStale(ctx, r, now.known)
	} else if now.found {
		r.Add(config.Note, "stale-unknown", "%s: which connections are stale is unknown.", now.unknown)
	}
	return nil
}

// health is what is read of this node besides rules.
func (s *session) health(ctx context.Context) health.Node {
	return health.On(s.proc, s.pods, func() (bool, error) { return s.kernel.OthersTranslate(ctx) })
}

// examine adds the report on other programs' rules and on this node.
func (s *session) examine(ctx context.Context, r *answer.Status, state *neighbors.State) error {
	want := state.Want
	r.SNAT = answer.NodeSNAT(want.Policy)
	others, err := state.Others()
	if err != nil {
		return err
	}
	others.Accept(s.AcceptForeign)
	r.SetOthers(others, s.TakeOver)
	if err := s.astray(ctx, r, state, others.Overridden); err != nil {
		return err
	}
	links, err := routes.Interfaces()
	if err != nil {
		return err
	}
	r.Take(answer.Interfaces(neighbors.AbsentInterfaces(want.Policy, links)))
	for _, p := range answer.UncoveredPods(want.Policy, s.PodCIDRs) {
		p.Level = config.Error // here: check warns of what may be meant
		r.Take(config.Problems{p})
	}
	return nil
}

// astray warns of a pod whose packets to an exempt destination may leave by another interface than that of
// its own routing rule: enforceNonMasquerade prevents the translation by a rule of another program, but not
// the mark that comes with it, by which a routing rule decides first.
func (s *session) astray(
	ctx context.Context, r *answer.Status, state *neighbors.State, prevented []neighbors.Conflict,
) error {
	own, err := routes.SourceRules()
	if err != nil || len(own) == 0 || len(prevented) == 0 {
		return nil //nolint:nilerr // health says what cannot be read
	}
	tracer, err := state.Tracer(ctx, state.Want)
	if err != nil {
		return err
	}
	for _, c := range prevented {
		pods, err := s.pods(c.Dst.Is6())
		if err != nil || c.Dst.IsLinkLocalUnicast() {
			continue
		}
		for _, pod := range pods {
			q := routes.Query{Src: pod, Dst: c.Dst}
			i := slices.IndexFunc(own, func(r routes.SourceRule) bool { return r.From.Contains(pod) && r.To.Contains(c.Dst) })
			if i < 0 {
				continue
			}
			alone, err := s.routes(q)
			if err != nil {
				return err
			}
			of := nft.Connection{Src: pod, Dst: c.Dst, In: alone.Back.Interface.Name, Out: alone.Out()[0]}
			if !judge.Enforced(state.Want.Policy, of) {
				continue
			}
			q.Mark, q.Open = tracer.Mark(pod, c.Dst, alone)
			marked, err := s.routes(q)
			if err != nil {
				return err
			}
			for _, out := range marked.Out() {
				if out != "" && !slices.Contains(alone.Out(), out) {
					r.Explain(config.Warning, health.RoutingRules, fmt.Sprintf("the mark decides before %s, and stays although "+
						"%s prevents the translation in %s %s\n%s", own[i], config.KeyEnforceNonMasquerade, c.Table(), c.Chain(),
						health.Dropped), "pods keep their address to %s, but a mark may lead %s there by %s", c.Dst, pod,
						config.Printable(out))
					return nil
				}
			}
			break // one pod of this node is enough
		}
	}
	return nil
}

// countStale adds the report on connections that contradict the policy in the kernel, and on
// source ports.
func countStale(ctx context.Context, r *answer.Status, held *neighbors.State) {
	j, err := held.Judge()
	var stale conntrack.Stale
	var tally conntrack.Tally
	ports := conntrack.Ports(judge.SourcePorts(held.Want.Policy))
	if err == nil {
		stale, err = conntrack.Open().CountStale(j, func() func(*conntrack.Entry) {
			tally = conntrack.Tally{}
			return func(e *conntrack.Entry) { tally.Add(e, ports) }
		})
	}
	if err != nil {
		r.Add(config.Warning, "stale-unknown", "cannot count stale connections: %v", err)
		return
	}
	for _, reason := range j.Spared {
		r.Add(config.Note, "stale-unknown", "Which connections are stale is not certain: %s.", reason)
	}
	r.SetStale(stale)
	r.SetPorts(tally, func(k conntrack.PortKey) []netip.Addr {
		pods := map[netip.Addr]bool{}
		_ = (&selection{}).each(ctx, true, func() { clear(pods) }, func(e *conntrack.Entry) {
			if of, ok := ports.Key(e); ok && of == k {
				pods[e.Original.Src.Addr()] = true
			}
		})
		return slices.SortedFunc(maps.Keys(pods), netip.Addr.Compare)
	})
}
