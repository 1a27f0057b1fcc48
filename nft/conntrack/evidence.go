package conntrack

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// Evidence is what the tracked connections of a node show about a policy. It says what happened, and
// does not know which rule did it.
//
// A [History] tells which of the contradicting connections are older than the policy. Only the agent has one: it
// answers GET /history on its socket. Without an agent, that is not known.
//
// Its memory does not depend on the number of connections: examples, entries, destinations and
// history are bounded.
type Evidence struct {
	// Counts are those of each entry of the policy that decides about a connection: the ones with
	// contradictions first, then the largest. Beyond 1,024 entries, those of a key are counted together,
	// in one without a CIDR.
	Counts []Count
	// Answers are the counts of the queries, in their order.
	Answers []Count
	// NotJudged counts connections that are no evidence, by the name of the [Finding].
	NotJudged map[string]int
	// Unanswered are destinations of exempt connections that show the pod's address, from which no
	// replies come. Of a family whose uplink is silent, there is that alone.
	Unanswered []Unanswered
	// Fullest is the destination to which the largest share of source ports is in use. It is an estimate if only a sample
	// of the connections was examined.
	Fullest PortUse

	Sample
	Incomplete bool // a bound was hit: some destinations or connections were not kept
}

// A Count is connections that are judged, of an entry of the policy or of a [Query].
type Count struct {
	Entry  judge.Entry
	Agrees int
	// Answered are those of Agrees that had a reply.
	Answered int
	// Stale are those that contradict the policy and began before it.
	Stale int
	// Overruled are those that contradict the policy and began under it: another program translated
	// them, or kept them from being translated.
	Overruled int
	// Undated are those that contradict the policy, and it is not known when they began.
	Undated int
	// Examples are up to three examples of those that contradict: overruled ones first, then undated, then stale
	// ones.
	Examples []Example
	// Closed are those that agree and are closed: only of a [Query].
	Closed int
	// Seen are up to three addresses as which answered ones of Agrees are seen: only of a [Query].
	Seen []netip.Addr
	// Endpoints are up to three destinations, of connections to the address that was asked for, which lead elsewhere:
	// only of a [Query].
	Endpoints []netip.AddrPort
}

// Contradictions is the number of connections that contradict the policy.
func (c Count) Contradictions() int { return c.Stale + c.Overruled + c.Undated }

// Open is the number of connections that were judged: open ones, and overruled ones that are closed.
func (c Count) Open() int { return c.Agrees + c.Contradictions() }

// An Example is a connection that contradicts the policy.
type Example struct {
	Entry
	Verdict nft.Verdict // of the policy
	Age     Age
}

// An Age is when a connection that contradicts the policy began.
type Age string

// The ages.
const (
	AgeStale     Age = "stale"     // before the policy
	AgeOverruled Age = "overruled" // under the policy
	AgeUndated   Age = "undated"   // it is not known
)

// Entry returns the count of an entry of the policy. It is zero if no connection is of it, or if there were too many
// entries and it is counted with its key.
func (e Evidence) Entry(entry judge.Entry) Count {
	for _, c := range e.Counts {
		if c.Entry == entry {
			return c
		}
	}
	return Count{}
}

// sampleSize is the most entries examined in one dump.
const sampleSize = 200_000

// A Sample describes how much of a table was examined. The kernel's order is
// random, so the examined entries are representative.
type Sample struct {
	Examined int  // entries
	Tracked  int  // in the table
	Partial  bool // there were more entries than were examined
}

// dumpSample is like [Tracker.Dump], but visits at most as many entries as a sample has.
func (t *Tracker) dumpSample(ctx context.Context, begin func(), visit func(*Entry)) (s Sample, err error) {
	stats, err := t.Stats()
	if err != nil {
		return s, err
	}
	s.Tracked = int(stats.Entries)
	begin()
	if s.Tracked == 0 {
		return s, nil // to find that out, a dump walks the table of all namespaces
	}
	err = t.Dump(ctx, func() {
		s.Examined = 0
		begin()
	}, func(e *Entry) error {
		visit(e)
		s.Examined++
		if s.Examined < t.sampleLimit {
			return nil
		}
		s.Partial = s.Tracked > s.Examined
		return errStop
	})
	return s, err
}

// Gather compares each connection with the policy, in one pass. It ends with the context.
func (t *Tracker) Gather(ctx context.Context, c *Comparison, h History, queries ...Query) (Evidence, error) {
	var g *gathering
	ports := judge.SourcePorts(c.policy)
	s, err := t.dumpSample(ctx, func() { g = newGathering(c, h, queries) }, func(e *Entry) {
		g.add(e)
		g.ports.Add(e, ports)
	})
	if err != nil {
		return Evidence{}, err
	}
	found := g.evidence()
	found.Sample = s
	if s.Partial {
		found.Fullest.Used = found.Fullest.Used * s.Tracked / s.Examined
	}
	return found, nil
}

// ReadEvidence compares each connection on the node of the calling thread with a policy, in one pass. It ends with the
// context.
func ReadEvidence(ctx context.Context, p nft.Policy, h History, queries ...Query) (Evidence, error) {
	c, err := ReadComparison(p)
	if err != nil {
		return Evidence{}, err
	}
	return New().Gather(ctx, c, h, queries...)
}

// Bounds of what a gathering keeps.
const (
	maxCounts   = 1024
	maxExamples = 3
)

// A gathering is evidence that is being gathered.
type gathering struct {
	*Comparison
	history   History
	queries   []Query
	answers   []Count
	counts    map[judge.Entry]*Count
	notJudged [findings]int
	replies   *replies
	ports     Tally
}

func newGathering(c *Comparison, h History, queries []Query) *gathering {
	return &gathering{
		Comparison: c, history: h, queries: queries, answers: make([]Count, len(queries)),
		counts: map[judge.Entry]*Count{}, replies: newReplies(c.timeouts), ports: Tally{},
	}
}

func (g *gathering) add(e *Entry) {
	ruling, found := g.Compare(e)
	g.replies.see(e, ruling.Entry, found)
	if found == Closed { // it agrees
		for i, q := range g.queries {
			if q.matches(e) {
				g.answers[i].Closed++
			}
		}
	}
	var age Age
	if found == Contradicts {
		age = g.history.Age(e)
		if age == "" {
			found = Closed
		}
	}
	if found > Contradicts {
		g.notJudged[found]++
		return
	}
	g.count(ruling.Entry).add(e, ruling.Verdict, age)
	for i, q := range g.queries {
		if q.matches(e) {
			g.answers[i].add(e, ruling.Verdict, age)
			g.answers[i].show(q, e, age)
		}
	}
}

// count returns the count of an entry, or of its key if there are too many.
func (g *gathering) count(entry judge.Entry) *Count {
	c := g.counts[entry]
	if c == nil && len(g.counts) >= maxCounts {
		entry.CIDR = netip.Prefix{}
		c = g.counts[entry]
	}
	if c == nil {
		c = &Count{Entry: entry}
		g.counts[entry] = c
	}
	return c
}

// add counts a connection, of which the policy has a verdict. Its age is "" if it agrees with that.
func (c *Count) add(e *Entry, verdict nft.Verdict, age Age) {
	switch age {
	case AgeStale:
		c.Stale++
	case AgeOverruled:
		c.Overruled++
	case AgeUndated:
		c.Undated++
	default:
		c.Agrees++
		if e.Status&SeenReply != 0 {
			c.Answered++
		}
		return
	}
	c.addExample(Example{*e, verdict, age})
}

// certainty orders examples of what contradicts: another program decided for certain, perhaps, or not.
var certainty = []Age{AgeOverruled, AgeUndated, AgeStale}

func (c *Count) addExample(x Example) {
	position := 0
	for _, other := range c.Examples {
		if slices.Index(certainty, other.Age) <= slices.Index(certainty, x.Age) {
			position++
		}
	}
	if position < maxExamples {
		c.Examples = slices.Insert(c.Examples, position, x)
		c.Examples = c.Examples[:min(len(c.Examples), maxExamples)]
	}
}

// show adds what an answer shows of a connection.
func (c *Count) show(q Query, e *Entry, age Age) {
	seen := e.SeenAs().Addr()
	if age == "" && e.Status&SeenReply != 0 && len(c.Seen) < maxExamples && !slices.Contains(c.Seen, seen) {
		c.Seen = append(c.Seen, seen)
	}
	endpoint := e.Destination()
	if endpoint.Addr() != q.To.Addr() && len(c.Endpoints) < maxExamples && !slices.Contains(c.Endpoints, endpoint) {
		c.Endpoints = append(c.Endpoints, endpoint)
	}
}

func (g *gathering) evidence() Evidence {
	e := Evidence{Answers: g.answers, NotJudged: map[string]int{}, Fullest: g.ports.Fullest()}
	for f, n := range g.notJudged {
		if n > 0 {
			e.NotJudged[Finding(f).String()] = n
		}
	}
	for _, c := range g.counts {
		e.Counts = append(e.Counts, *c)
	}
	slices.SortFunc(e.Counts, compareCounts)
	e.Unanswered = g.replies.unanswered()
	e.Incomplete = g.replies.full || g.history.Incomplete
	return e
}

func compareCounts(a, b Count) int {
	return cmp.Or(b.Overruled-a.Overruled, b.Contradictions()-a.Contradictions(), b.Open()-a.Open(),
		strings.Compare(a.Entry.String(), b.Entry.String()))
}
