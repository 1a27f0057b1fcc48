package observe

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/older"
)

// surveyInterval is the least time between two checks of other programs' rules.
// They take at most 0.5 % of the time: for 50,000 rules, a check takes a second.
const surveyInterval = time.Minute

// survey reports other programs' rules that masquerade. Reading and searching them takes
// seconds if there are many.
type survey struct {
	*agent.Agent
	host    Host
	o       options.Options
	done    agent.View    // about which the last one was; the zero view: none
	at      time.Time     // when it began
	took    time.Duration // how long it took
	seed    maphash.Seed
	counted atomic.Pointer[counts] // nil until the first one

	// What was found, so that it is logged once.
	lists     map[string][]string
	conflicts map[uint64]bool // by hash
	unread    int             // rules not examined because there are too many
}

// inXTables is the name of the list of chains in legacy ip_tables.
const inXTables = "xtables"

// counts are the numbers of other programs' rules by their effect.
type counts struct{ masquerading, exempting, translating, legacy int }

func newSurvey(a *agent.Agent, h Host, o options.Options) *survey {
	return &survey{Agent: a, host: h, o: o, seed: maphash.MakeSeed(), lists: map[string][]string{}}
}

func (s *survey) Run(ctx context.Context) {
	s.Follow(ctx, func(v agent.View, checked bool) {
		if s.due(v, checked) {
			s.look(ctx, v)
		}
	})
}

// due reports whether to read other programs' rules: for another policy and after SIGHUP
// at once, and after another program's change within bounds.
func (s *survey) due(v agent.View, checked bool) bool {
	switch {
	case v.Installed == nil:
		return false
	case s.done.Installed == nil || !v.Installed.Same(*s.done.Installed) || v.Hangups != s.done.Hangups:
		return true
	case checked: // changes of legacy ip_tables lead to no other generation
		if x, err := s.host.XTables(); err == nil && !slices.Equal(namesOf(x), s.lists[inXTables]) {
			return true
		}
	}
	return v.Generation != s.done.Generation && time.Since(s.at) >= max(surveyInterval, agent.CheckShare*s.took)
}

// look reads other programs' rules, and logs what is new.
func (s *survey) look(ctx context.Context, v agent.View) {
	s.done, s.at = v, time.Now()
	others, err := s.host.Others(ctx, *v.Installed)
	s.took = time.Since(s.at)
	switch now := s.Now().Installed; {
	case ctx.Err() != nil || now == nil || !now.Same(*v.Installed): // it was for an earlier policy
	case err != nil:
		s.done.Generation = 0 // so that they are read again
		s.Log(zap.WarnLevel, "foreign_rules_unreadable", "cannot read other programs' rules", "error", err)
	default:
		s.counted.Store(&counts{
			len(others.Conflicts), len(others.Of(neighbors.Exempts)), len(others.Of(neighbors.Translates)), len(others.Legacy) +
				len(others.XTables),
		})
		s.logLegacy(others)
		s.logXTables(others.XTables)
		s.logConflicts(others)
		s.Log(zap.DebugLevel, "foreign_rules_checked", "checked other programs' rules", "duration_ms",
			float64(s.took.Microseconds())/1000)
	}
}

// collect exports how many rules there are, by their effect.
func (s *survey) Collect(e agent.Exporter) {
	n := s.counted.Load()
	if n == nil {
		return
	}
	e.Gauge("other_masquerading_rules",
		"Other programs' rules that masquerade what the config exempts, without accepted ones and those that meet no pod.",
		float64(n.masquerading))
	e.Gauge("other_exempting_rules",
		"Other programs' rules that accept what the config masquerades: before the jump in mode iptables-nft, otherwise "+
			"without effect on this agent.", float64(n.exempting))
	e.Gauge("other_translating_rules",
		"Other programs' rules that translate what the config masquerades to another source address, write one into it, "+
			"drop it, or turn off its connection tracking.", float64(n.translating))
	e.Gauge("legacy_chains", "Chains of iptables-based agents. A nat table of legacy ip_tables that has rules of such "+
		"agents counts as one.", float64(n.legacy))
}

func namesOf[T fmt.Stringer](chains []T) (names []string) {
	for _, c := range chains {
		names = append(names, c.String())
	}
	return names
}

// changed reports whether a list is another one than at the last call.
func (s *survey) changed(what string, list []string) bool {
	was := s.lists[what]
	s.lists[what] = list
	return !slices.Equal(list, was)
}

// logXTables logs what --takeover cannot remove.
func (s *survey) logXTables(tables []older.XTable) {
	found := namesOf(tables)
	switch changed := s.changed(inXTables, found); {
	case !changed:
	case len(found) == 0:
		s.Log(zap.InfoLevel, "xtables_rules_gone", "the rules of iptables-based agents in legacy ip_tables are gone")
	default:
		s.Log(zap.WarnLevel, "xtables_rules_found",
			"rules of an iptables-based agent are in legacy ip_tables, where --takeover "+
				"and cleanup cannot remove them: stop that agent; iptables-legacy -t nat -S shows them", "found", found)
	}
}

func (s *survey) logLegacy(others neighbors.Others) {
	found := namesOf(others.Legacy)
	fields := []any{"found", found}
	random := s.o.NFT().RandomFully
	if want := s.Now().Want; want != nil {
		random = want.Policy.RandomFully
	}
	if slices.ContainsFunc(others.Legacy, func(c older.Chain) bool { return c.RandomFully }) && !random {
		fields = append(fields, "note", "it uses random source ports, but this agent does not: see --random-fully")
	}
	switch changed := s.changed("legacy", found); {
	case !changed:
	case len(found) == 0:
		s.Log(zap.InfoLevel, "legacy_rules_gone", "the rules of iptables-based agents are gone")
	case !s.o.TakeOver, len(older.Removable(others.Legacy)) == 0: // the text says why
		s.Log(zap.WarnLevel, "legacy_rules_active",
			"rules of an iptables-based agent are also active: stop it, and run with --takeover or cleanup --legacy-only",
			fields...)
	case !s.Now().TakesOver:
		s.Log(zap.WarnLevel, "legacy_rules_kept", "rules of an iptables-based agent stay until a config is accepted",
			fields...)
	} // otherwise they are about to be removed
}

// maxLogged is how many conflicts a survey logs one by one. Some CNI plugins have a rule
// for each pod.
const maxLogged = 20

func (s *survey) logConflicts(others neighbors.Others) {
	found, more := make(map[uint64]bool, len(others.Conflicts)), -maxLogged
	for _, c := range slices.Concat(others.Conflicts, others.Overruled) {
		is := c.Hash(s.seed)
		known := found[is] || s.conflicts[is]
		if found[is] = true; known {
			continue
		}
		if more++; more > 0 {
			continue
		}
		fields := []any{
			"table", c.Table(), "chain", c.Chain(), "priority", c.Base.Hook.Priority, "rule", c.RuleText(), "why", c.Why(),
			"remedy", c.Kind.Remedy(),
		}
		if len(c.Via) > 0 {
			fields = append(fields, "via", strings.Join(c.ViaText(), "; "))
		}
		kind := map[neighbors.Kind]struct{ event, message string }{
			neighbors.Masquerades: {"foreign_masquerade", "another program's rule masquerades what the config exempts"},
			neighbors.Exempts:     {"foreign_exemption", "another program's rule accepts what the config masquerades"},
			neighbors.Translates:  {"foreign_translation", "another program's rule translates what the config masquerades"},
			neighbors.Untracks: {
				"foreign_notrack",
				"another program's rule turns off connection tracking for what the config masquerades",
			},
			neighbors.Writes: {
				"foreign_rewrite",
				"another program's rule writes a source address into what the config masquerades",
			},
			neighbors.Drops: {"foreign_drop", "another program's chain drops what the config masquerades"},
		}[c.Kind]
		s.Log(zap.WarnLevel, kind.event, kind.message, fields...)
	}
	if more > 0 {
		s.Log(zap.WarnLevel, "further_foreign_rules",
			"more rules of other programs contradict the config; see nft-masq-agent status", "rules", more)
	}
	if len(s.conflicts) > 0 && len(found) == 0 {
		s.Log(zap.InfoLevel, "foreign_rules_gone", "other programs' rules no longer contradict the config")
	}
	if others.Unread > 0 && s.unread == 0 {
		s.Log(zap.WarnLevel, "foreign_rules_unread",
			"other programs have too many rules to examine; the effect of the rest is unknown",
			"rules", others.Unread)
	}
	s.conflicts, s.unread = found, others.Unread
}
