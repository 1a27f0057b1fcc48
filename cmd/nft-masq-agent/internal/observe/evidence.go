package observe

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
)

// told is what the log has been told of the evidence about the rules in force, so that it has one line
// for each entry of the policy, destination and family.
type told struct {
	changes   int // of the rules
	stale     bool
	overruled map[judge.Entry]overruling
	silent    map[netip.Addr]bool
	uplinks   [2]bool
	further   bool // there is a line about more than maxTold
}

// An overruling is when an entry last had overruled connections, and how many.
type overruling struct {
	at    time.Time
	count conntrack.Count
}

const (
	// maxTold is how many entries and destinations have a line of their own.
	maxTold = 20
	// recently is for how long an entry is overruled after the last connection.
	recently = 10 * time.Minute
)

// tell logs what is new, and what is gone.
func (t *told) tell(a *agent.Agent, e conntrack.Evidence) {
	if t.overruled == nil {
		t.overruled = map[judge.Entry]overruling{}
		t.silent = map[netip.Addr]bool{}
	}
	t.tellStale(a, e)
	t.tellOverruled(a, e)
	t.tellSilent(a, e)
	t.tellUplinks(a, e)
}

// tellStale logs once how many connections keep the translation of an earlier policy.
func (t *told) tellStale(a *agent.Agent, e conntrack.Evidence) {
	stale, undated := 0, 0
	for _, c := range e.Counts {
		stale += c.Stale
		undated += c.Undated
	}
	if t.stale || stale+undated == 0 {
		return
	}
	t.stale = true
	fields := []any{"connections", stale, "undated", undated}
	if e.Partial {
		fields = append(fields, "sampled", e.Examined, "tracked", e.Tracked)
	}
	a.Log(zap.InfoLevel, "stale_connections",
		"existing connections keep an address that contradicts the current rules", fields...)
}

func (t *told) tellOverruled(a *agent.Agent, e conntrack.Evidence) {
	for _, c := range e.Counts {
		if c.Overruled == 0 {
			break // they come first
		}
		_, known := t.overruled[c.Entry]
		t.overruled[c.Entry] = overruling{e.Time, c}
		if known || !t.room(a, len(t.overruled)) {
			continue
		}
		x := c.Contradicting[0]
		a.Log(zap.WarnLevel, "connections_overruled", "connections contradict the policy: "+c.OverruledText(),
			"family", conntrack.FamilyName(c.Entry.IPv6), "entry", c.Entry.String(), "verdict", string(c.Entry.Verdict),
			"connections", c.Overruled, "source", x.Source.String(), "destination", x.Destination.String(),
			"seen_as", x.SeenAs.String())
	}
	for entry, o := range t.overruled {
		if e.Time.Sub(o.at) > recently {
			delete(t.overruled, entry)
			a.Log(zap.InfoLevel, "connections_overruled_gone", "connections no longer contradict the policy", "family",
				conntrack.FamilyName(entry.IPv6), "entry", entry.String())
		}
	}
}

// room reports whether an entry has a line of its own; n is how many there are with it.
func (t *told) room(a *agent.Agent, n int) bool {
	if n <= maxTold {
		return true
	}
	if !t.further {
		t.further = true
		a.Log(zap.WarnLevel, "further_evidence",
			"more of the policy is contradicted, or unanswered: see nft-masq-agent status")
	}
	return false
}

func (t *told) tellSilent(a *agent.Agent, e conntrack.Evidence) {
	silent := map[netip.Addr]bool{}
	for _, u := range e.Unanswered {
		silent[u.To] = true
		if t.silent[u.To] {
			continue
		}
		t.silent[u.To] = true
		if t.room(a, len(t.silent)) {
			a.Log(zap.WarnLevel, "destination_unanswered", u.Text(), "destination", u.To.String(), "entry",
				u.Entry.String(), "connections", u.Answered+u.Silent, "answered", u.Answered)
		}
	}
	for to := range t.silent {
		if !silent[to] && !hidden(e, to) {
			delete(t.silent, to)
			a.Log(zap.InfoLevel, "destination_unanswered_gone",
				"no connections to a destination are unanswered any more: it answers, or nobody asks", "destination",
				to.String())
		}
	}
}

// hidden reports whether nothing is known of a destination, because the uplink is silent.
func hidden(e conntrack.Evidence, to netip.Addr) bool {
	return slices.ContainsFunc(e.SilentUplinks, func(u conntrack.Unanswered) bool { return u.Entry.IPv6 == to.Is6() })
}

func (t *told) tellUplinks(a *agent.Agent, e conntrack.Evidence) {
	var silent [2]bool
	for _, u := range e.SilentUplinks {
		i := 0
		if u.Entry.IPv6 {
			i = 1
		}
		silent[i] = true
		if !t.uplinks[i] {
			a.Log(zap.WarnLevel, "uplink_unanswered", u.UplinkText(), "family", conntrack.FamilyName(u.Entry.IPv6),
				"connections", u.Answered+u.Silent, "answered", u.Answered)
		}
	}
	for i := range silent {
		if t.uplinks[i] && !silent[i] {
			a.Log(zap.InfoLevel, "uplink_unanswered_gone", "masqueraded connections are answered again", "family",
				conntrack.FamilyName(i == 1))
		}
	}
	t.uplinks = silent
}

// recent returns the last counts of the entries that were overruled recently.
func (t *told) recent(now time.Time) (all []conntrack.Count) {
	for _, o := range t.overruled {
		if now.Sub(o.at) <= recently {
			all = append(all, o.count)
		}
	}
	slices.SortFunc(all, func(a, b conntrack.Count) int {
		if a.Overruled != b.Overruled {
			return b.Overruled - a.Overruled
		}
		return compareEntries(a.Entry, b.Entry)
	})
	return all
}

// A series is the labels of a metric.
type series struct {
	ipv6          bool
	key, evidence string
}

// export exports the evidence, by keys: there may be thousands of entries.
func export(e agent.Exporter, found conntrack.Evidence) {
	counts, stale := map[series]int{}, 0
	for _, c := range found.Counts {
		stale += c.Stale
		for evidence, n := range map[string]int{
			"agrees": c.Agrees, "stale": c.Stale, "overruled": c.Overruled, "undated": c.Undated,
		} {
			counts[series{c.Entry.IPv6, keyName(c.Entry), evidence}] += n
		}
	}
	for _, s := range sorted(counts) {
		e.Gauge("judged_connections", "Open connections by the key of the config that decides about them, and whether their "+
			"translation agrees with the policy: agrees, stale (they began before it), overruled (they began under it: another "+
			"program decided), undated (it is not known when they began).",
			float64(counts[s]), "family", familyLabel(s.ipv6), "key", s.key, "evidence", s.evidence)
	}
	e.Gauge("stale_connections", "Open connections that contradict the policy and began before it.", float64(stale))
	for _, reason := range slices.Sorted(maps.Keys(found.NotJudged)) {
		e.Gauge("unjudged_connections", "Tracked connections that are no evidence about the policy, by reason.",
			float64(found.NotJudged[reason]), "reason", reason)
	}
	silent := map[series]int{}
	for s := range counts {
		silent[series{ipv6: s.ipv6, key: s.key}] = 0
	}
	for _, u := range found.Unanswered {
		silent[series{ipv6: u.Entry.IPv6, key: keyName(u.Entry)}]++
	}
	for _, s := range sorted(silent) {
		e.Gauge("unanswered_destinations",
			"Destinations of at least five connections that show the pod's IP, of which nine of ten have no reply.",
			float64(silent[s]), "family", familyLabel(s.ipv6), "key", s.key)
	}
	for _, ipv6 := range []bool{false, true} {
		is := slices.ContainsFunc(found.SilentUplinks, func(u conntrack.Unanswered) bool { return u.Entry.IPv6 == ipv6 })
		e.Gauge("uplink_unanswered", "Whether nearly no masqueraded connection is answered: 1 or 0.", agent.Number(is),
			"family", familyLabel(ipv6))
	}
}

func sorted(all map[series]int) []series {
	return slices.SortedFunc(maps.Keys(all), func(a, b series) int {
		return cmp.Or(strings.Compare(familyLabel(a.ipv6), familyLabel(b.ipv6)), strings.Compare(a.key, b.key),
			strings.Compare(a.evidence, b.evidence))
	})
}

func compareEntries(a, b judge.Entry) int { return strings.Compare(a.String(), b.String()) }

// keyName is the label of an entry.
func keyName(e judge.Entry) string { return cmp.Or(e.Key, "anything else") }

func familyLabel(ipv6 bool) string {
	if ipv6 {
		return "ipv6"
	}
	return "ipv4"
}
