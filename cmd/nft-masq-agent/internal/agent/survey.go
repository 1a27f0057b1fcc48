package agent

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// surveyInterval is the least time between two checks of other programs' rules.
// They take at most 0.5 % of the time: for 50,000 rules, a check takes a second.
const surveyInterval = time.Minute

// A survey is what was last found about other programs' rules. Reading and
// searching them takes seconds if there are many, so that happens outside the
// loop, to which the result is an event.
type survey struct {
	at      time.Time // when the last one began; zero: begin one in any case
	took    time.Duration
	due     bool // another program wrote since, or the config changed
	running bool
	results chan surveyed // of the running one
	held    layout.Depth  // what to check when it has ended
	// What was found, so that it is logged once.
	legacy    []string
	xtables   []string
	routing   []string
	conflicts map[uint64]bool // by hash
	unread    int             // rules not examined because there are too many
	seed      maphash.Seed
}

// surveyed is the result of a survey for a ruleset.
type surveyed struct {
	want   nft.Ruleset
	others kernel.Others
	err    error
	took   time.Duration
}

// checkOthers begins to check other programs' rules that masquerade, if it is time.
func (a *Agent) checkOthers(ctx context.Context, now time.Time) {
	a.checkInterfaces()
	s := &a.survey
	if a.policy.want == nil || s.running {
		return
	}
	if x, err := a.kernel.XTables(); err == nil && !slices.Equal(namesOf(x), s.xtables) {
		s.at = time.Time{} // changes of legacy ip_tables do not make it due
	}
	if !s.at.IsZero() && (!s.due || now.Sub(s.at) < max(surveyInterval, checkShare*s.took)) {
		return
	}
	s.at, s.due, s.running = now, false, true
	want := *a.policy.want
	go func() {
		start := time.Now()
		others, err := a.kernel.Others(ctx, want)
		s.results <- surveyed{want, others, err, time.Since(start)}
	}()
}

// surveyed handles the result of a survey: it logs what is new.
func (a *Agent) surveyed(ctx context.Context, r surveyed) {
	s := &a.survey
	s.running, s.took = false, r.took
	switch {
	case errors.Is(r.err, context.Canceled): // the agent ends
		return
	case a.policy.want == nil || !a.policy.want.Same(r.want):
		s.at = time.Time{} // it was for an earlier policy
	case r.err != nil:
		a.log.Warn("cannot read other programs' rules", zap.String("event", "foreign_rules_unreadable"), zap.Error(r.err))
	default:
		a.health.found(r.others)
		a.logLegacy(r.others)
		a.logXTables(r.others.XTables)
		a.logRouting(r.others.Routing)
		a.logConflicts(r.others)
		a.log.Debug("checked other programs' rules", milliseconds(r.took), zap.String("event", "foreign_rules_checked"))
	}
	if depth := s.held; depth > layout.Ours {
		s.held = layout.Ours
		a.sync(ctx, onResync, depth)
	}
	if s.at.IsZero() {
		a.checkOthers(ctx, time.Now())
	}
}

// hold returns a depth at which no other programs' rules are read, until the
// running survey has ended: the loop would be slow, and both together would take
// too much memory.
func (s *survey) hold(depth layout.Depth) layout.Depth {
	if !s.running {
		return depth
	}
	s.held = max(s.held, depth)
	return layout.Ours
}

func namesOf[T fmt.Stringer](chains []T) (names []string) {
	for _, c := range chains {
		names = append(names, c.String())
	}
	return names
}

// logXTables logs what --takeover cannot remove, and the commands to remove it.
func (a *Agent) logXTables(chains []foreign.XTChain) {
	s := &a.survey
	found := namesOf(chains)
	if slices.Equal(found, s.xtables) {
		return
	}
	s.xtables = found
	if len(found) == 0 {
		a.log.Info("the rules of iptables-based agents in legacy ip_tables are gone", zap.String("event", "xtables_rules_gone"))
		return
	}
	var commands []string
	for _, c := range chains {
		commands = append(commands, c.Commands()...)
	}
	a.log.Warn("rules of an iptables-based agent are in legacy ip_tables, where --takeover and cleanup cannot remove them: stop that agent and run the commands",
		zap.String("event", "xtables_rules_found"), zap.Strings("found", found), zap.Strings("commands", commands))
}

// logRouting logs the commands that remove an older agent's rules of policy routing.
func (a *Agent) logRouting(commands []string) {
	if len(commands) > 0 && !slices.Equal(commands, a.survey.routing) {
		a.log.Warn("routing rules of an older agent are left, which this agent does not remove",
			zap.String("event", "routing_rules_found"), zap.Strings("commands", commands))
	}
	a.survey.routing = commands
}

func (a *Agent) logLegacy(others kernel.Others) {
	s := &a.survey
	found, fields := a.legacyFields(others.Legacy)
	if slices.Equal(found, s.legacy) {
		return
	}
	s.legacy = found
	if len(found) == 0 {
		a.log.Info("the rules of iptables-based agents are gone", zap.String("event", "legacy_rules_gone"))
		return
	}
	switch {
	case !a.settings.TakeOver:
	case !a.takesOver():
		a.log.Warn("rules of an iptables-based agent stay until a config is accepted", append(fields, zap.String("event", "legacy_rules_kept"))...)
		return
	default:
		return // about to be removed
	}
	a.log.Warn("rules of an iptables-based agent are also active: stop it, and run with --takeover or cleanup --legacy-only", append(fields, zap.String("event", "legacy_rules_active"))...)
}

// logTakenOver logs that rules of an older agent came back and were removed.
func (a *Agent) logTakenOver(applied kernel.Applied) {
	a.log.Warn("rules of an iptables-based agent came back and were removed: stop that agent", zap.String("event", "legacy_rules_removed"),
		zap.Strings("taken_over", applied.TookOver))
}

// logReplaced logs which rules were in the place of ours.
func (a *Agent) logReplaced(replaced []foreign.LegacyChain) {
	if found, fields := a.legacyFields(replaced); len(found) > 0 {
		a.log.Warn("rules of another agent or version in our chain were replaced: stop any iptables-based agent", append(fields, zap.String("event", "legacy_rules_replaced"))...)
	}
}

func (a *Agent) legacyFields(chains []foreign.LegacyChain) (found []string, fields []zap.Field) {
	found = namesOf(chains)
	fields = []zap.Field{zap.Strings("found", found)}
	if slices.ContainsFunc(chains, func(c foreign.LegacyChain) bool { return c.RandomFully }) && !a.settings.NFT().RandomFully {
		fields = append(fields, zap.String("note", "it masquerades to random source ports, this agent does not: see --random-fully"))
	}
	return found, fields
}

// How many conflicts under one base chain, and in all, a check logs individually.
// Some CNI plugins have a rule for each pod.
const (
	maxLogged    = 20
	maxLoggedAll = 100
)

func (a *Agent) logConflicts(others kernel.Others) {
	s := &a.survey
	found, logged, more, all := make(map[uint64]bool, len(others.Conflicts)), map[string]int{}, map[string]int{}, 0
	for _, c := range slices.Concat(others.Conflicts, others.Overruled) {
		is := c.Hash(s.seed)
		if found[is] || s.conflicts[is] {
			found[is] = true
			continue
		}
		found[is] = true
		base := c.Table() + " " + nfnetlink.Printable(c.Base)
		if logged[base] == maxLogged || all == maxLoggedAll {
			more[base]++
			continue
		}
		logged[base]++
		all++
		fields := []zap.Field{
			zap.String("table", c.Table()), zap.String("chain", c.Chain()), zap.Int32("priority", c.Priority),
			zap.String("rule", c.RuleText()), zap.String("why", c.Why()),
		}
		if len(c.Via) > 0 {
			fields = append(fields, zap.String("via", strings.Join(c.ViaText(), "; ")))
		}
		kind := map[foreign.Kind]struct{ event, message string }{
			foreign.Masquerades: {"foreign_masquerade", "another program's rule masquerades what the config exempts"},
			foreign.Exempts:     {"foreign_exemption", "another program's rule accepts what the config masquerades"},
			foreign.Translates:  {"foreign_translation", "another program's rule translates what the config masquerades"},
		}[c.Kind]
		a.log.Warn(kind.message, append(fields, zap.String("event", kind.event))...)
	}
	bases := slices.Sorted(maps.Keys(more))
	if len(bases) > maxLogged {
		rest := fmt.Sprintf("%d other base chains", len(bases)-maxLogged)
		for _, base := range bases[maxLogged:] {
			more[rest] += more[base]
		}
		bases = append(bases[:maxLogged], rest)
	}
	for _, base := range bases {
		a.log.Warn("more rules of other programs contradict the config; see nft-masq-agent status",
			zap.String("event", "further_foreign_rules"), zap.String("reachable_from", base), zap.Int("rules", more[base]))
	}
	if len(s.conflicts) > 0 && len(found) == 0 {
		a.log.Info("other programs' rules no longer contradict the config", zap.String("event", "foreign_rules_gone"))
	}
	s.conflicts = found
	if others.Unread > 0 && s.unread == 0 {
		a.log.Warn("other programs have too many rules to examine; the effect of the rest is unknown",
			zap.String("event", "foreign_rules_unread"), zap.Int("rules", others.Unread))
	}
	s.unread = others.Unread
}
