package observe

import (
	"cmp"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
)

// told is what the log has been told of the evidence about the rules in force, so that it has one line
// for each entry of the policy, destination and family.
type told struct {
	subjects map[string]bool
	// overruled are the last counts of entries that had overruled connections.
	overruled map[judge.Entry]overruled
}

type overruled struct {
	conntrack.Count
	seen time.Time
}

const (
	// maxTold is how many subjects have a line of their own.
	maxTold = 20
	// recently is for how long an entry is overruled after the last connection.
	recently = 10 * time.Minute
)

func newTold() told {
	return told{subjects: map[string]bool{}, overruled: map[judge.Entry]overruled{}}
}

// tell logs what is new.
func (t *told) tell(a *agent.Agent, e conntrack.Evidence) {
	stale := 0
	undated := 0
	for _, c := range e.Counts {
		stale += c.Stale
		undated += c.Undated
		if c.Overruled == 0 {
			continue
		}
		t.overruled[c.Entry] = overruled{c, time.Now()}
		family := nft.FamilyKey(c.Entry.IPv6)
		x := c.Examples[0]
		t.once(a, family+" "+c.Entry.String(), zap.WarnLevel, "connections_overruled",
			"connections contradict the policy: another program decides; nft-masq-agent explain "+
				x.Destination().Addr().String()+" --from "+x.Original.Src.Addr().String()+" --trace names its rule",
			"family", family, "entry", c.Entry.String(), "verdict", string(c.Entry.Verdict), "connections", c.Overruled,
			"source", x.Original.Src.String(), "destination", x.Destination().String(), "seen_as", x.SeenAs().String())
	}
	if stale+undated > 0 {
		t.once(a, "stale", zap.InfoLevel, "stale_connections",
			"existing connections keep an address that contradicts the current rules",
			"connections", stale, "undated", undated)
	}
	for _, u := range e.Unanswered {
		event := "uplink_unanswered"
		subject := nft.FamilyKey(u.Entry.IPv6)
		fields := []any{"family", subject}
		if u.To.IsValid() {
			event = "destination_unanswered"
			subject = u.To.String()
			fields = []any{"destination", subject, "entry", u.Entry.String()}
		}
		fields = append(fields, "connections", u.Answered+u.Silent, "answered", u.Answered)
		t.once(a, event+" "+subject, zap.WarnLevel, event, u.String()+": "+u.Remedy(), fields...)
	}
}

// once logs a line about a subject that had none.
func (t *told) once(a *agent.Agent, subject string, level zapcore.Level, event, text string, fields ...any) {
	if t.subjects[subject] || len(t.subjects) > maxTold {
		return
	}
	t.subjects[subject] = true
	if len(t.subjects) > maxTold {
		a.Log(zap.WarnLevel, "further_evidence",
			"more of the policy is contradicted, or unanswered: see nft-masq-agent status")
		return
	}
	a.Log(level, event, text, fields...)
}

// recent returns the last counts of the entries that were overruled recently.
func (t *told) recent() (counts []conntrack.Count) {
	for _, o := range t.overruled {
		if time.Since(o.seen) <= recently {
			counts = append(counts, o.Count)
		}
	}
	return counts
}

// exportStats exports the counters of connection tracking.
func exportStats(e agent.Exporter, s conntrack.Stats) {
	e.Counter("conntrack_insert_failed_total",
		"Connections that the kernel could not track, including those without a free source port.",
		float64(s.InsertFailed))
	e.Counter("conntrack_drop_total", "Packets that the kernel dropped because their connection could not be tracked.",
		float64(s.Drop))
	e.Gauge("conntrack_entries", "Tracked connections.", float64(s.Entries))
	if s.Limit > 0 {
		e.Gauge("conntrack_limit", "Maximum number of tracked connections.", float64(s.Limit))
	}
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
	for s := range counts {
		e.Gauge("judged_connections", "Connections by the key of the config that decides about them, and whether their "+
			"translation agrees with the policy: agrees, stale (they began before it), overruled (they began under it, and may "+
			"be closed: another program decided), undated (it is not known when they began).",
			float64(counts[s]), "family", nft.FamilyKey(s.ipv6), "key", s.key, "evidence", s.evidence)
	}
	e.Gauge("stale_connections", "Open connections that contradict the policy and began before it.", float64(stale))
	for reason, n := range found.NotJudged {
		e.Gauge("unjudged_connections", "Tracked connections that are no evidence about the policy, by reason.",
			float64(n), "reason", reason)
	}
	silent := map[series]int{}
	for s := range counts {
		silent[series{ipv6: s.ipv6, key: s.key}] = 0
	}
	uplinks := map[bool]bool{}
	for _, u := range found.Unanswered {
		if u.To.IsValid() {
			silent[series{ipv6: u.Entry.IPv6, key: keyName(u.Entry)}]++
		} else {
			uplinks[u.Entry.IPv6] = true
		}
	}
	for s := range silent {
		e.Gauge("unanswered_destinations",
			"Destinations of at least five connections that show the pod's IP, of which nine of ten have no reply.",
			float64(silent[s]), "family", nft.FamilyKey(s.ipv6), "key", s.key)
	}
	for _, ipv6 := range []bool{false, true} {
		e.Gauge("uplink_unanswered", "Whether nearly no masqueraded connection is answered: 1 or 0.",
			agent.Number(uplinks[ipv6]), "family", nft.FamilyKey(ipv6))
	}
	e.Gauge("snat_ports_used_ratio_max",
		"Share of source ports in use, for the source address, protocol and destination with the most; with portsPerPod, of "+
			"the ports of a block. Connections fail from 0.9 on.", found.Fullest.Share())
}

// keyName is the label of an entry.
func keyName(e judge.Entry) string { return cmp.Or(e.Key, "anything else") }
