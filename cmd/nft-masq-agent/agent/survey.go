package agent

import (
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
)

// surveyInterval is the least time between two looks at the rules of others.
// They are read whole, which for 50,000 rules takes a good part of a second.
const surveyInterval = time.Minute

// A survey is what was last found of others.
type survey struct {
	at  time.Time
	due bool   // somebody wrote since
	by  string // the process that wrote last
	// What was found, so that it is said once.
	legacy    []string
	conflicts map[place]bool
}

// lookAround looks for the rules of other programs that masquerade, and says
// what is new.
func (a *Agent) lookAround() {
	s := &a.survey
	if a.want == nil || !s.at.IsZero() && (!s.due || time.Since(s.at) < surveyInterval) {
		return
	}
	defer litter()()
	others, err := a.kernel.Others(*a.want)
	s.at, s.due = time.Now(), false
	if err != nil {
		a.log.Warn("looking for the rules of others", zap.Error(err))
		return
	}
	a.health.found(len(others.Conflicts), len(others.Legacy))
	a.sayLegacy(others)
	a.sayConflicts(others)
}

func (a *Agent) sayLegacy(others kernel.Others) {
	s := &a.survey
	var found []string
	randomFully := false
	for _, l := range others.Legacy {
		found = append(found, l.String())
		randomFully = randomFully || l.RandomFully
	}
	if slices.Equal(found, s.legacy) {
		return
	}
	s.legacy = found
	if len(found) == 0 {
		a.log.Info("the rules of iptables-based agents are gone")
		return
	}
	fields := []zap.Field{zap.Strings("found", found)}
	if randomFully && !a.settings.Options.RandomFully {
		fields = append(fields, zap.String("note", "it masquerades to random source ports, this agent does not: see --random-fully"))
	}
	switch {
	case !a.settings.TakeOver:
	case a.owed.TakeOver || !a.health.everReady():
		a.log.Warn("rules of an iptables-based agent are not taken over until a config is accepted", fields...)
		return
	default:
		if s.by != "" {
			fields = append(fields, zap.String("last change by", s.by))
		}
		a.log.Warn("rules of an iptables-based agent are back after the take-over: stop that agent", fields...)
		return
	}
	a.log.Warn("rules of an iptables-based agent decide beside ours: stop it, and run with --takeover or cleanup --legacy", fields...)
}

// maxSaid is how many conflicts a look says one by one. Some CNI plugins have a
// rule for each pod.
const maxSaid = 20

// A place is where a rule stands.
type place struct {
	family nfnetlink.Family
	table  string
	handle uint64
}

func (a *Agent) sayConflicts(others kernel.Others) {
	found, said, more := map[place]bool{}, 0, 0
	for _, c := range others.Conflicts {
		at := place{c.Rule.Family, c.Rule.Table, c.Rule.Handle}
		if found[at] = true; a.survey.conflicts[at] {
			continue
		}
		if said == maxSaid {
			more++
			continue
		}
		said++
		fields := []zap.Field{
			zap.String("table", c.Table()), zap.String("chain", c.Rule.Chain), zap.Int32("priority", c.Priority),
			zap.String("rule", c.RuleText()), zap.String("why", c.Why()),
		}
		if len(c.Via) > 0 {
			fields = append(fields, zap.String("via", strings.Join(c.ViaText(), "; ")))
		}
		a.log.Warn("another rule masquerades what the config exempts", fields...)
	}
	if more > 0 {
		a.log.Warn("further rules masquerade what the config exempts, see nft-masq-agent status", zap.Int("rules", more))
	}
	a.survey.conflicts = found
}
