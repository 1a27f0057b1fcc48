package observe

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/xtables"
)

// searchInterval is the least time between two searches for older agents' rules.
// They take at most 0.5 % of the time: with 50,000 rules of other programs, one takes a second.
const searchInterval = time.Minute

// olderAgents reports rules of iptables-based agents, which this one replaces. A search takes
// seconds if there are many rules.
type olderAgents struct {
	*agent.Agent
	host    Host
	o       cli.Options
	done    agent.View    // about which the last search was; the zero view: none
	began   time.Time     // when it began
	took    time.Duration // how long it took
	counted atomic.Pointer[int]

	// What was found, so that it is logged once.
	chains, tables []string
}

func newOlderAgents(a *agent.Agent, h Host, o cli.Options) *olderAgents {
	return &olderAgents{Agent: a, host: h, o: o}
}

// Run implements [agent.Observer].
func (s *olderAgents) Run(ctx context.Context) {
	s.Follow(ctx, func(v agent.View, checked bool) {
		if s.due(v, checked) {
			s.search(ctx, v)
		}
	})
}

// due reports whether to search: for another policy and after SIGHUP at once, and after another
// program's change within bounds.
func (s *olderAgents) due(v agent.View, checked bool) bool {
	if v.Installed == nil || v.Pending {
		return false
	}
	if s.done.Installed == nil || !v.Installed.Same(*s.done.Installed) || v.Hangups != s.done.Hangups {
		return true
	}
	if checked { // changes of legacy ip_tables lead to no other generation
		tables, err := s.host.XTables()
		if err == nil && !slices.Equal(namesOf(tables), s.tables) {
			return true
		}
	}
	return v.Generation != s.done.Generation && time.Since(s.began) >= max(searchInterval, agent.CheckShare*s.took)
}

// search searches, and logs what is new. If another policy is decided meanwhile, it ends, and is done again for that.
func (s *olderAgents) search(ctx context.Context, v agent.View) {
	ctx, end := s.WithPolicy(ctx, v)
	defer end()
	s.done = v
	s.began = time.Now()
	chains, err := s.host.Older(ctx, *v.Installed)
	var tables []xtables.LegacyTable
	if err == nil {
		tables, err = s.host.XTables()
	}
	s.took = time.Since(s.began)
	if ctx.Err() != nil {
		s.done = agent.View{}
		return
	}
	if err != nil {
		s.done.Generation = 0 // so that they are read again
		s.Log(zap.WarnLevel, "legacy_rules_unreadable", "cannot search for rules of iptables-based agents", "error", err)
		return
	}
	n := len(chains) + len(tables)
	s.counted.Store(&n)
	s.logChains(chains)
	s.logTables(tables)
	s.Log(zap.DebugLevel, "legacy_rules_checked", "searched for rules of iptables-based agents", "duration_ms",
		float64(s.took.Microseconds())/1000)
}

// Collect implements [agent.Observer].
func (s *olderAgents) Collect(e agent.Exporter) {
	if n := s.counted.Load(); n != nil {
		e.Gauge("legacy_chains", "Chains of iptables-based agents. A nat table of legacy ip_tables that has rules of such "+
			"agents counts as one.", float64(*n))
	}
}

func namesOf[T fmt.Stringer](chains []T) (names []string) {
	for _, c := range chains {
		names = append(names, c.String())
	}
	return names
}

// isNew remembers what was found, and reports whether that is something else than before. It logs if it is gone.
func (s *olderAgents) isNew(known *[]string, found []string, event, text string) bool {
	if slices.Equal(*known, found) {
		return false
	}
	*known = found
	if len(found) == 0 {
		s.Log(zap.InfoLevel, event, text)
		return false
	}
	return true
}

// logTables logs what --takeover cannot remove.
func (s *olderAgents) logTables(tables []xtables.LegacyTable) {
	if !s.isNew(&s.tables, namesOf(tables), "xtables_rules_gone",
		"the rules of iptables-based agents in legacy ip_tables are gone") {
		return
	}
	s.Log(zap.WarnLevel, "xtables_rules_found",
		"rules of an iptables-based agent are in legacy ip_tables, where --takeover "+
			"and cleanup cannot remove them: stop that agent; iptables-legacy -t nat -S shows them", "found", s.tables)
}

func (s *olderAgents) logChains(chains []xtables.OlderChain) {
	if !s.isNew(&s.chains, namesOf(chains), "legacy_rules_gone", "the rules of iptables-based agents are gone") {
		return
	}
	fields := []any{"found", s.chains}
	random := s.o.NFT().RandomFully
	if want := s.Current().Want; want != nil {
		random = want.Policy.RandomFully
	}
	if slices.ContainsFunc(chains, func(c xtables.OlderChain) bool { return c.RandomFully }) && !random {
		fields = append(fields, "note", "it uses random source ports, but this agent does not: see --random-fully")
	}
	switch {
	case s.o.TakeOver && len(xtables.Removable(chains)) == 0:
		s.Log(zap.WarnLevel, "legacy_rules_active",
			"rules of an iptables-based agent are also active, and not certainly its own: stop it, and delete them", fields...)
	case !s.o.TakeOver:
		s.Log(zap.WarnLevel, "legacy_rules_active",
			"rules of an iptables-based agent are also active: stop it, and run with --takeover or cleanup --legacy-only",
			fields...)
	case !s.Current().TakesOver:
		s.Log(zap.WarnLevel, "legacy_rules_kept", "rules of an iptables-based agent stay until a config is accepted",
			fields...)
	} // otherwise they are about to be removed
}
