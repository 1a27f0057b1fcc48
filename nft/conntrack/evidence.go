package conntrack

import (
	"context"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// Evidence is what the tracked connections of a node show about a policy. It says what happened, and
// does not know which rule did it.
//
// To gather it:
//
//	node, err := conntrack.ReadNode()
//	c := conntrack.NewComparison(policy, node)
//	evidence, err := conntrack.Open().Gather(ctx, c, conntrack.History{}, questions...)
//
// A [History] tells which of the contradicting connections are older than the policy. Only the agent
// has one, so next to an agent its report has the evidence, and a command that gathers it itself can
// not tell, unless the sysctl nf_conntrack_timestamp is 1: then Count.Undated counts them.
//
// Its memory does not depend on the number of connections: examples, entries, destinations and
// history are bounded.
type Evidence struct {
	Time time.Time `json:"time"` // of its end
	Hash string    `json:"hash"` // of the policy
	// Counts are those of each entry of the policy that decides about a connection: the ones with
	// contradictions first, then the largest. Beyond 1,024 entries, those of a key are counted together,
	// in one without a CIDR.
	Counts []Count `json:"counts"`
	// Answers are the counts of the questions, in their order.
	Answers []Count `json:"answers,omitempty"`
	// NotJudged counts connections that are no evidence, by the name of the [Finding].
	NotJudged map[string]int `json:"notJudged,omitempty"`
	// Unanswered are destinations of exempt connections that show the pod's address, from which no
	// replies come. There are none of a family whose uplink is silent.
	Unanswered []Unanswered `json:"unanswered,omitempty"`
	// SilentUplinks are the families of which nearly nothing that is masqueraded is answered.
	SilentUplinks []Unanswered `json:"silentUplinks,omitempty"`

	Examined int  `json:"examined"`          // connections
	Tracked  int  `json:"tracked"`           // in the table
	Partial  bool `json:"partial,omitempty"` // only a random part of them was examined: 200,000
	Full     bool `json:"full,omitempty"`    // a bound was hit: some destinations or connections were not kept
}

// A Count is connections that are judged, of an entry of the policy or of a [Question].
type Count struct {
	Entry  judge.Entry `json:"entry,omitzero"`
	Agrees int         `json:"agrees"`
	// Stale are those that contradict the policy and began before it.
	Stale int `json:"stale,omitempty"`
	// Overruled are those that contradict the policy and began under it: another program translated
	// them, or kept them from being translated.
	Overruled int `json:"overruled,omitempty"`
	// Undated are those that contradict the policy, and it is not known when they began.
	Undated int `json:"undated,omitempty"`
	// Agreeing and Contradicting are up to three examples of each; the latter are overruled ones, if
	// there are any.
	Agreeing      []Example `json:"agreeing,omitempty"`
	Contradicting []Example `json:"contradicting,omitempty"`
}

// Contradicts is the number of connections that contradict the policy.
func (c Count) Contradicts() int { return c.Stale + c.Overruled + c.Undated }

// Open is the number of connections that were judged.
func (c Count) Open() int { return c.Agrees + c.Contradicts() }

// An Example is a connection.
type Example struct {
	Protocol    string         `json:"protocol"`
	Source      netip.AddrPort `json:"source"`
	Destination netip.AddrPort `json:"destination"` // after DNAT
	SeenAs      netip.AddrPort `json:"seenAs"`
	Answered    bool           `json:"answered"`
	Age         Age            `json:"age,omitempty"` // "" if it agrees
}

// An Age is when a connection that contradicts the policy began.
type Age string

// The ages.
const (
	AgeStale     Age = "stale"     // before the policy
	AgeOverruled Age = "overruled" // under the policy
	AgeUndated   Age = "undated"   // it is not known
)

// Entry returns the count of an entry of the policy, or of its key if there were too many entries.
func (e Evidence) Entry(entry judge.Entry) Count {
	for _, c := range e.Counts {
		if c.Entry == entry {
			return c
		}
	}
	return Count{Entry: entry}
}

// A Question asks for the connections from a source, if it is valid, to a destination, after or before
// DNAT. Protocol and port are not asked if they are 0.
type Question struct {
	From     netip.Addr
	To       netip.AddrPort
	Protocol uint8
}

func (q Question) matches(e *Entry) bool {
	of := func(dst netip.AddrPort) bool {
		return dst.Addr() == q.To.Addr() && (q.To.Port() == 0 || dst.Port() == q.To.Port())
	}
	return (!q.From.IsValid() || e.Original.Src.Addr() == q.From) &&
		(q.Protocol == 0 || e.Original.Protocol == q.Protocol) && (of(e.Destination()) || of(e.Original.Dst))
}

// A History tells since when a policy is in force, and which connections contradicted it then. The
// zero History knows nothing.
type History struct {
	Since time.Time
	// Earlier remembers those that contradicted the policy when it came into force; nil: not known.
	Earlier *Noted
	// FromStart says that nothing is known of what was in force before: the agent started then.
	FromStart bool
}

// age returns when an entry that contradicts the policy began.
func (h History) age(e *Entry) Age {
	switch {
	case !e.Started.IsZero() && !h.Since.IsZero() && !h.FromStart:
		if e.Started.Before(h.Since) {
			return AgeStale
		}
		return AgeOverruled
	case h.Earlier == nil:
		return AgeUndated
	case h.Earlier.has(e):
		if h.FromStart {
			return AgeUndated
		}
		return AgeStale
	case h.Earlier.Full:
		return AgeUndated
	}
	return AgeOverruled
}

// maxNoted bounds the memory of noted connections: twenty bytes for each.
const maxNoted = 1 << 16

// Noted are connections that are remembered by a hash of their addresses, ports and ID.
type Noted struct {
	seed  maphash.Seed
	set   map[uint64]struct{}
	limit int
	// Full says that there were more than are remembered.
	Full bool
}

func newNoted(limit int) *Noted {
	return &Noted{seed: maphash.MakeSeed(), set: map[uint64]struct{}{}, limit: limit}
}

func (n *Noted) hash(e *Entry) uint64 { return maphash.Comparable(n.seed, e.Key) }

func (n *Noted) has(e *Entry) bool {
	_, found := n.set[n.hash(e)]
	return found
}

func (n *Noted) add(e *Entry) {
	if len(n.set) < n.limit {
		n.set[n.hash(e)] = struct{}{}
		return
	}
	n.Full = true
}

func (n *Noted) drop(e *Entry) { delete(n.set, n.hash(e)) }

// Len returns how many connections are remembered.
func (n *Noted) Len() int { return len(n.set) }

// Note remembers the connections that contradict a policy that has just come into force. It ends with
// the context.
func (t *Tracker) Note(ctx context.Context, c *Comparison) (*Noted, error) {
	var n *Noted
	s, err := t.each(ctx, func() { n = newNoted(t.noted) }, func(e *Entry) {
		if _, found := c.Compare(e); found == Contradicts {
			n.add(e)
		}
	})
	if err != nil {
		return nil, err
	}
	n.Full = n.Full || s.Partial
	return n, nil
}

// each is like [Tracker.Dump], but visits at most as many entries as a sample has.
func (t *Tracker) each(ctx context.Context, begin func(), visit func(*Entry)) (s Sample, err error) {
	stats, err := t.Stats()
	if err != nil {
		return s, err
	}
	s.Entries = int(stats.Entries)
	begin()
	if s.Entries == 0 {
		return s, nil // to find that out, a dump walks the table of all namespaces
	}
	err = t.Dump(ctx, Filter{}, func() {
		s.Examined = 0
		begin()
	}, func(e *Entry) error {
		visit(e)
		s.Examined++
		if s.Examined < t.sample {
			return nil
		}
		s.Partial = s.Entries > s.Examined
		return errStop
	})
	return s, err
}

// Gather compares each connection with the policy, in one pass. It ends with the context.
func (t *Tracker) Gather(ctx context.Context, c *Comparison, h History, questions ...Question) (Evidence, error) {
	var g *gathering
	s, err := t.each(ctx, func() { g = newGathering(c, h, questions) }, func(e *Entry) { g.add(e) })
	if err != nil {
		return Evidence{}, err
	}
	found := g.evidence()
	found.Time = time.Now()
	found.Examined, found.Tracked, found.Partial = s.Examined, s.Entries, s.Partial
	found.Full = found.Full || h.Earlier != nil && h.Earlier.Full
	return found, nil
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
	questions []Question
	answers   []Count
	counts    map[judge.Entry]*Count
	notJudged [findings]int
	replies   *replies
}

func newGathering(c *Comparison, h History, questions []Question) *gathering {
	return &gathering{
		Comparison: c, history: h, questions: questions, answers: make([]Count, len(questions)),
		counts: map[judge.Entry]*Count{}, replies: newReplies(c.timeouts),
	}
}

func (g *gathering) add(e *Entry) {
	ruling, found := g.compare(e)
	g.replies.see(e, ruling.Entry, found)
	if found <= Contradicts && !e.open() {
		found = Closed
	}
	if found > Contradicts {
		g.notJudged[found]++
		return
	}
	var age Age
	if found == Contradicts {
		age = g.history.age(e)
	}
	g.count(ruling.Entry).add(e, age)
	for i, q := range g.questions {
		if q.matches(e) {
			g.answers[i].add(e, age)
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

func (c *Count) add(e *Entry, age Age) {
	switch age {
	case AgeStale:
		c.Stale++
	case AgeOverruled:
		c.Overruled++
	case AgeUndated:
		c.Undated++
	default:
		c.Agrees++
		if len(c.Agreeing) < maxExamples {
			c.Agreeing = append(c.Agreeing, newExample(e, age))
		}
		return
	}
	if len(c.Contradicting) < maxExamples {
		c.Contradicting = append(c.Contradicting, newExample(e, age))
		return
	}
	if age != AgeOverruled {
		return
	}
	i := slices.IndexFunc(c.Contradicting, func(x Example) bool { return x.Age != AgeOverruled })
	if i >= 0 {
		c.Contradicting[i] = newExample(e, age)
	}
}

func newExample(e *Entry, age Age) Example {
	return Example{
		Protocol: ProtocolName(e.Original.Protocol), Source: e.Original.Src, Destination: e.Destination(),
		SeenAs: e.SeenAs(), Answered: e.Status&SeenReply != 0, Age: age,
	}
}

func (g *gathering) evidence() Evidence {
	e := Evidence{Answers: g.answers, NotJudged: map[string]int{}}
	for f, n := range g.notJudged {
		if n > 0 {
			e.NotJudged[Finding(f).String()] = n
		}
	}
	for _, c := range g.counts {
		e.Counts = append(e.Counts, *c)
	}
	slices.SortFunc(e.Counts, compareCounts)
	e.Unanswered, e.SilentUplinks = g.replies.unanswered()
	e.Full = g.replies.full
	return e
}

func compareCounts(a, b Count) int {
	if n := b.Overruled - a.Overruled; n != 0 {
		return n
	}
	if n := b.Contradicts() - a.Contradicts(); n != 0 {
		return n
	}
	if n := b.Open() - a.Open(); n != 0 {
		return n
	}
	return strings.Compare(a.Entry.String(), b.Entry.String())
}

// An Unanswered is a destination from which no replies come, or with [Evidence.SilentUplinks] a family.
type Unanswered struct {
	Entry judge.Entry `json:"entry,omitzero"`
	// To is the destination.
	To netip.Addr `json:"to,omitzero"`
	// Answered and Silent count the connections to it: those with a reply, and those without one,
	// though older than ten seconds.
	Answered int `json:"answered"`
	Silent   int `json:"silent"`
}

// String returns the destination, and how many of the connections have a reply.
func (u Unanswered) String() string {
	return fmt.Sprintf("%s %d/%d", u.To, u.Answered, u.Answered+u.Silent)
}

// silentAfter is for how many seconds a connection has no reply before it counts as silent.
const silentAfter = 10

// A destination is silent if at least five connections to it can be judged, and nine of ten are silent.
const (
	fewestSilent = 5
	silentShare  = 0.9
)

func (u Unanswered) silent() bool {
	all := u.Answered + u.Silent
	return all >= fewestSilent && float64(u.Silent) >= silentShare*float64(all)
}

// replies counts which destinations answer.
type replies struct {
	timeouts map[uint8]uint32
	// answering are the UDP ports on which any connection was answered.
	answering    [1 << 16]bool
	destinations map[destination]Unanswered
	uplinks      [2]uplink
	full         bool
}

// A destination is an address, and of UDP a port.
type destination struct {
	address netip.Addr
	udp     bool
	port    uint16
}

// An uplink is what is masqueraded of a family.
type uplink struct {
	Unanswered
	to []netip.Addr // silent destinations, up to fewestDestinations
}

// fewestDestinations is how many destinations must be silent before the uplink is.
const fewestDestinations = 3

// maxDestinations bounds the memory.
const maxDestinations = 1 << 14

func newReplies(timeouts map[uint8]uint32) *replies {
	return &replies{timeouts: timeouts, destinations: map[destination]Unanswered{}}
}

// see counts an entry. Connections of which a translation hides who answers are left out: those that
// contradict the policy.
func (r *replies) see(e *Entry, entry judge.Entry, found Finding) {
	answered := e.Status&SeenReply != 0
	udp := e.Original.Protocol == unix.IPPROTO_UDP
	if answered && udp {
		r.answering[e.Destination().Port()] = true
	}
	if found != Agrees || !answered && !r.isSilent(e) {
		return
	}
	if entry.Verdict == nft.Masqueraded {
		if !udp || answered {
			r.uplinks[index(entry.IPv6)].see(e, answered)
		}
		return
	}
	to := destination{address: e.Destination().Addr(), udp: udp}
	if udp {
		to.port = e.Destination().Port()
	}
	u, known := r.destinations[to]
	if !known && len(r.destinations) >= maxDestinations {
		r.full = true
		return
	}
	u.Entry = entry
	u.count(answered)
	r.destinations[to] = u
}

func (u *Unanswered) count(answered bool) {
	if answered {
		u.Answered++
	} else {
		u.Silent++
	}
}

func (u *uplink) see(e *Entry, answered bool) {
	u.count(answered)
	dst := e.Destination().Addr()
	if !answered && len(u.to) < fewestDestinations && !slices.Contains(u.to, dst) {
		u.to = append(u.to, dst)
	}
}

// isSilent reports whether an entry without a reply is older than ten seconds: by the time that it
// began, or because it had no packet for that long.
func (r *replies) isSilent(e *Entry) bool {
	if e.Original.Protocol == unix.IPPROTO_TCP && e.State != "SYN_SENT" {
		return false
	}
	if !e.Started.IsZero() {
		return time.Since(e.Started) > silentAfter*time.Second
	}
	return e.Timeout+silentAfter < r.timeouts[e.Original.Protocol]
}

// unanswered returns the destinations that do not answer, and the families whose uplinks are silent.
func (r *replies) unanswered() (all, uplinks []Unanswered) {
	for i, u := range r.uplinks {
		if len(u.to) == fewestDestinations && u.silent() {
			u.Entry = judge.Entry{IPv6: i == 1, Verdict: nft.Masqueraded}
			uplinks = append(uplinks, u.Unanswered)
		}
	}
	byAddress := map[netip.Addr]Unanswered{}
	for to, u := range r.destinations {
		if to.udp && !r.expectsAnswers(to.port) {
			u.Silent = 0
		}
		sum := byAddress[to.address]
		sum.Entry, sum.To = u.Entry, to.address
		sum.Answered += u.Answered
		sum.Silent += u.Silent
		byAddress[to.address] = sum
	}
	for _, u := range byAddress {
		hidden := slices.ContainsFunc(uplinks, func(up Unanswered) bool { return up.Entry.IPv6 == u.Entry.IPv6 })
		if u.silent() && !hidden {
			all = append(all, u)
		}
	}
	slices.SortFunc(all, func(a, b Unanswered) int {
		if n := b.Silent - a.Silent; n != 0 {
			return n
		}
		return a.To.Compare(b.To)
	})
	return all, uplinks
}

// expectsAnswers reports whether what is sent to a UDP port is a request: somebody on this node got an
// answer on it, or it is that of DNS, NTP or QUIC. Those of syslog and statsd never answer. What it
// misses: a protocol of which the only destination is the silent one.
func (r *replies) expectsAnswers(port uint16) bool {
	switch port {
	case 53, 123, 443:
		return true
	}
	return r.answering[port]
}
