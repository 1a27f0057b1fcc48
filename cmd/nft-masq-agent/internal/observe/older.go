package observe

import (
	"context"
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
	host     Host
	o        cli.Options
	searched agent.View // about which the last search was; the zero view: none
	started  time.Time  // the last search
	duration time.Duration
	failed   failure
	count    atomic.Pointer[int]

	tables []xtables.LegacyTable // that were found
	found  []string              // what was logged last
}

// Run implements [agent.Observer].
func (s *olderAgents) Run(ctx context.Context) {
	s.EachView(ctx, func(v agent.View, checked bool) {
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
	if s.searched.Installed == nil || !v.Installed.Same(*s.searched.Installed) || v.Hangups != s.searched.Hangups {
		return true
	}
	if checked { // changes of legacy ip_tables lead to no other generation
		tables, err := s.host.LegacyTables()
		if err == nil && !slices.Equal(tables, s.tables) {
			return true
		}
	}
	pause := max(searchInterval, agent.CheckShare*s.duration)
	return v.Generation != s.searched.Generation && time.Since(s.started) >= pause
}

// search searches, and logs what is new. If another policy is decided meanwhile, it ends, and is done again for that.
func (s *olderAgents) search(ctx context.Context, v agent.View) {
	ctx, end := s.WithPolicy(ctx, v)
	defer end()
	s.searched = v
	s.started = time.Now()
	chains, err := s.host.Older(ctx, *v.Installed)
	var tables []xtables.LegacyTable
	if err == nil {
		tables, err = s.host.LegacyTables()
	}
	s.duration = time.Since(s.started)
	if ctx.Err() != nil {
		s.searched = agent.View{}
		return
	}
	s.failed.log(s.Agent, "legacy_rules_unreadable", "cannot search for rules of iptables-based agents", err)
	if err != nil {
		s.searched.Generation = 0 // so that they are read again
		return
	}
	n := len(chains) + len(tables)
	s.count.Store(&n)
	s.tables = tables
	s.tell(chains, tables)
	s.Log(zap.DebugLevel, "legacy_rules_checked", "searched for rules of iptables-based agents", "duration_ms",
		float64(s.duration.Microseconds())/1000)
}

// Collect implements [agent.Observer].
func (s *olderAgents) Collect(e agent.Exporter) {
	if n := s.count.Load(); n != nil {
		e.Gauge("legacy_chains", "Chains of iptables-based agents. A nat table of legacy ip_tables that has rules of such "+
			"agents counts as one.", float64(*n))
	}
}

// tell logs what was found, unless it was found before. Rules that are about to be removed are not logged.
func (s *olderAgents) tell(chains []xtables.OlderChain, tables []xtables.LegacyTable) {
	found := cli.Texts(chains)
	for _, table := range tables {
		found = append(found, "legacy ip_tables: table "+table.String())
	}
	if slices.Equal(found, s.found) {
		return
	}
	s.found = found
	text := "rules of an iptables-based agent are also active: "
	switch {
	case len(found) == 0:
		s.Log(zap.InfoLevel, "legacy_rules_gone", "the rules of iptables-based agents are gone")
		return
	case len(tables) > 0:
		text += "--takeover and cleanup cannot remove those in legacy ip_tables: stop that agent; iptables-legacy -t nat " +
			"-S shows them"
	case !s.o.TakeOver:
		text += "stop it, and run with --takeover or cleanup --legacy-only"
	case len(xtables.Removable(chains)) == 0:
		text += "they are not certainly its own: stop it, and delete them"
	case !s.Current().TakesOver:
		text += "they stay until a config is accepted"
	default: // they are about to be removed
		return
	}
	s.Log(zap.WarnLevel, "legacy_rules_active", text, "found", found)
}
