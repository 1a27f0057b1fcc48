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
	changes  int // of the rules
	stale    bool
	findings map[string]finding
	further  bool // there is a line about more than maxTold
}

// A finding is what evidence shows about an entry of the policy, a destination, or a family.
type finding struct {
	event, text       string
	endEvent, endText string // event and text when it is no longer seen
	subject           []any  // the fields that both lines have
	fields            []any  // those of the first line alone
	lastSeen          time.Time
	count             conntrack.Count // of an entry
	destination       netip.Addr      // a destination
}

const (
	// maxTold is how many findings have a line of their own.
	maxTold = 20
	// recently is for how long an entry is overruled after the last connection.
	recently = 10 * time.Minute
)

// tell logs what is new, and what is gone.
func (t *told) tell(a *agent.Agent, e conntrack.Evidence) {
	if t.findings == nil {
		t.findings = map[string]finding{}
	}
	t.tellStale(a, e)
	current := findings(e)
	for _, key := range slices.Sorted(maps.Keys(current)) {
		f := current[key]
		_, known := t.findings[key]
		t.findings[key] = f
		if !known && t.room(a) {
			a.Log(zap.WarnLevel, f.event, f.text, append(f.subject, f.fields...)...)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(t.findings)) {
		f := t.findings[key]
		_, seen := current[key]
		lasts := f.count.Overruled > 0 && e.Time.Sub(f.lastSeen) <= recently
		if seen || lasts || hidden(e, f.destination) {
			continue
		}
		delete(t.findings, key)
		a.Log(zap.InfoLevel, f.endEvent, f.endText, f.subject...)
	}
}

// findings returns what evidence shows that contradicts the policy, or is unanswered.
func findings(e conntrack.Evidence) map[string]finding {
	found := map[string]finding{}
	for _, c := range e.Counts {
		if c.Overruled == 0 {
			break // they come first
		}
		family := conntrack.FamilyName(c.Entry.IPv6)
		x := c.Contradicting[0]
		found["entry "+family+" "+c.Entry.String()] = finding{
			event: "connections_overruled", text: "connections contradict the policy: " + c.OverruledText(),
			endEvent: "connections_overruled_gone", endText: "connections no longer contradict the policy",
			subject: []any{"family", family, "entry", c.Entry.String()},
			fields: []any{
				"verdict", string(c.Entry.Verdict), "connections", c.Overruled, "source", x.Source.String(), "destination",
				x.Destination.String(), "seen_as", x.SeenAs.String(),
			},
			lastSeen: e.Time, count: c,
		}
	}
	for _, u := range e.Unanswered {
		found["destination "+u.To.String()] = finding{
			event: "destination_unanswered", text: u.Text(), endEvent: "destination_unanswered_gone",
			endText:     "no connections to a destination are unanswered any more: it answers, or nobody asks",
			subject:     []any{"destination", u.To.String()},
			fields:      []any{"entry", u.Entry.String(), "connections", u.Answered + u.Silent, "answered", u.Answered},
			destination: u.To,
		}
	}
	for _, u := range e.SilentUplinks {
		family := conntrack.FamilyName(u.Entry.IPv6)
		found["uplink "+family] = finding{
			event: "uplink_unanswered", text: u.UplinkText(), endEvent: "uplink_unanswered_gone",
			endText: "masqueraded connections are answered again",
			subject: []any{"family", family},
			fields:  []any{"connections", u.Answered + u.Silent, "answered", u.Answered},
		}
	}
	return found
}

// tellStale logs once how many connections keep the translation of an earlier policy.
func (t *told) tellStale(a *agent.Agent, e conntrack.Evidence) {
	stale := 0
	undated := 0
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

// room reports whether the last finding has a line of its own.
func (t *told) room(a *agent.Agent) bool {
	if len(t.findings) <= maxTold {
		return true
	}
	if !t.further {
		t.further = true
		a.Log(zap.WarnLevel, "further_evidence",
			"more of the policy is contradicted, or unanswered: see nft-masq-agent status")
	}
	return false
}

// hidden reports whether nothing is known of a destination, because the uplink is silent.
func hidden(e conntrack.Evidence, dst netip.Addr) bool {
	return dst.IsValid() &&
		slices.ContainsFunc(e.SilentUplinks, func(u conntrack.Unanswered) bool { return u.Entry.IPv6 == dst.Is6() })
}

// recent returns the last counts of the entries that were overruled recently.
func (t *told) recent() (counts []conntrack.Count) {
	for _, f := range t.findings {
		if f.count.Overruled > 0 {
			counts = append(counts, f.count)
		}
	}
	slices.SortFunc(counts, func(a, b conntrack.Count) int {
		return cmp.Or(b.Overruled-a.Overruled, strings.Compare(a.Entry.String(), b.Entry.String()))
	})
	return counts
}

// A series is the labels of a metric.
type series struct {
	ipv6          bool
	key, evidence string
}

// export exports the evidence, by keys: there may be thousands of entries.
func export(e agent.Exporter, found conntrack.Evidence) {
	counts := map[series]int{}
	stale := 0
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
		unanswered := slices.ContainsFunc(found.SilentUplinks, func(u conntrack.Unanswered) bool {
			return u.Entry.IPv6 == ipv6
		})
		e.Gauge("uplink_unanswered", "Whether nearly no masqueraded connection is answered: 1 or 0.",
			agent.Number(unanswered), "family", familyLabel(ipv6))
	}
}

func sorted(counts map[series]int) []series {
	return slices.SortedFunc(maps.Keys(counts), func(a, b series) int {
		return cmp.Or(strings.Compare(familyLabel(a.ipv6), familyLabel(b.ipv6)), strings.Compare(a.key, b.key),
			strings.Compare(a.evidence, b.evidence))
	})
}

// keyName is the label of an entry.
func keyName(e judge.Entry) string { return cmp.Or(e.Key, "anything else") }

func familyLabel(ipv6 bool) string {
	if ipv6 {
		return "ipv6"
	}
	return "ipv4"
}
