package foreign

import (
	"cmp"
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
)

// A Trace is the effect of the chains of some hooks on a packet.
type Trace struct {
	// Ways are the rules that may translate the packet, in the order in which it
	// reaches them. All but the last depend on a condition that is unknown; so
	// does the last one if Through is true.
	Ways    []Way
	Through bool     // it may also pass through untranslated
	Unknown []string // the unknown conditions, as nft writes them
	// Left is the last rule that certainly ended a base chain early for the packet.
	Left *Way
	// Untracked is the rule that turned off connection tracking, and with it NAT.
	Untracked *Way
	// Dropped is the rule that certainly drops the packet in a chain that does not
	// translate sources, and Drops are those that may do so.
	Dropped *Way
	Drops   []Way
	// Redirects are rules that write another destination into the packet, without NAT.
	Redirects []Way
}

// A Way is a rule that translates a packet.
type Way struct {
	Place
	// To are the new addresses, the zero value if the rule does not name them:
	// with Masquerade, they are those of the interface. Keeps means that the
	// packet keeps its own address.
	To         iprange.Range
	Among      []netip.Addr // the addresses that a map has, if To is one of them
	Masquerade bool
	Keeps      bool
	Drops      bool // the rule drops the packet instead
	// Writes means that the rule writes the address into each packet, without NAT.
	Writes bool
	// Direct means that a condition leading to the rule names the packet's
	// destination: only then is the rule known to be for this address.
	Direct bool
	Own    bool // the rule is this agent's
}

// A Tracer follows packets through all chains. Only chains of type nat translate
// connections.
type Tracer struct {
	*walker
	out     Trace
	accepts truth // a rule ends the base chain early
	// What rules have done to the packet.
	untracked truth // connection tracking is off for it
	by        *Way  // by this rule
	written   *Way  // the rule that certainly writes this source into it
	maybe     *Way  // the last one that may write another
}

// NewTracer reads the chains of all hooks. own reports which chains are this agent's.
func NewTracer(ctx context.Context, c *nfnetlink.Conn, own func(nfnetlink.Chain) bool) (*Tracer, error) {
	all := func(nfnetlink.Chain) bool { return true }
	s, err := read(reader{ctx: ctx, conn: c, own: own, reads: all, tracing: true})
	if err != nil {
		return nil, err
	}
	t := &Tracer{walker: newWalker(s, Packet{})}
	t.conn, t.visit = c, t.see
	return t, nil
}

// Trace follows a packet: first through the hook at which its destination can be translated,
// then through those at which its source can be, or which drop it. At each hook the base
// chains come in the kernel's order: by priority. Of chains with equal priority the one
// registered last runs first, but the kernel does not report the order: if several of them
// translate the packet, any of them may be first.
func (t *Tracer) Trace(p Packet) (destination, source Trace) {
	t.start(p)
	first, later := uint32(unix.NF_INET_PRE_ROUTING), []uint32{unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
	switch {
	case p.FromNode:
		first, later = unix.NF_INET_LOCAL_OUT, later[1:]
	case p.DstType == unix.RTN_LOCAL:
		later, p.Out, t.facts.Out = []uint32{unix.NF_INET_LOCAL_IN}, routes.Interface{}, routes.Interface{}
	default:
		t.facts.Out = routes.Interface{} // not yet known
	}
	t.pass(first)
	destination, t.facts.Out = t.out, p.Out
	t.out = Trace{Through: true, Dropped: destination.Dropped, Drops: destination.Drops}
	t.pass(later...)
	t.addWritten()
	return destination, t.out
}

func (t *Tracer) start(p Packet) {
	*t = Tracer{walker: t.walker, out: Trace{Through: true}}
	t.restart()
	t.facts, t.mark, t.full = p, marking{}, false
	t.dst = []iprange.Range{{From: p.Dst, To: p.Dst}}
}

// pass follows the packet through hooks in which its source, or its destination, can be translated.
func (t *Tracer) pass(hooks ...uint32) {
	for _, hook := range hooks {
		t.atHook(hook)
	}
	if t.full || t.spent() {
		t.out.Unknown = slices.Insert(t.out.Unknown, 0, tooMany)
		t.out.Through = true
	}
	switch t.untracked {
	case yes:
		t.out.Untracked = t.by
	case maybe:
		if t.out.Through = true; len(t.out.Ways) > 0 {
			t.unknown("whether connection tracking is off, by " + t.by.RuleText())
		}
	case no:
	}
}

// addWritten adds the rules that write into the packet what no NAT after them replaces.
func (t *Tracer) addWritten() {
	if w := t.written; w != nil && t.out.Through {
		t.out.Ways, t.out.Through = append(t.out.Ways, *w), false
	}
	if w := t.maybe; w != nil {
		t.out.Ways = append(t.out.Ways, *w)
		t.unknown("what that rule writes into the packet")
	}
}

// atHook follows the packet through the base chains of a hook. Those of equal priority may
// come in any order: each may be the first of them.
func (t *Tracer) atHook(hook uint32) {
	var bases []*Chain
	for i := range t.Chains {
		c := &t.Chains[i]
		ofFamily := c.Family == nfnetlink.Inet || (c.Family == nfnetlink.IPv6) == t.facts.Dst.Is6()
		if c.Hook != nil && c.Hook.Number == hook && ofFamily {
			bases = append(bases, c)
		}
	}
	slices.SortStableFunc(bases, func(a, b *Chain) int { return cmp.Compare(a.Hook.Priority, b.Hook.Priority) })
	var through bool
	var equal []Way     // of chains of one priority
	var translating int // how many of these chains
	for i, c := range bases {
		if i == 0 || c.Hook.Priority != bases[i-1].Hook.Priority {
			through, equal, translating = t.out.Through, nil, 0
		}
		nat := c.Hook.Type == "nat"
		if nat && (t.untracked == yes || !through) {
			continue
		}
		n := len(t.out.Ways)
		if passes := t.enter(c); nat && !passes {
			t.written, t.maybe, t.out.Through = nil, nil, false
		}
		if len(t.out.Ways) > n {
			translating++
			equal = append(equal, t.out.Ways[n:]...)
		}
		if translating > 1 && !sameTarget(equal) {
			t.unknown("which of the chains of equal priority was registered last")
		}
	}
}

// enter follows the packet through a base chain, and reports whether it may pass
// untranslated.
func (t *Tracer) enter(c *Chain) (passes bool) {
	src := t.facts.From
	switch {
	case t.facts.Src.IsValid():
		src = []iprange.Range{{From: t.facts.Src, To: t.facts.Src}}
	case src == nil:
		src = []iprange.Range{iprange.All(t.facts.Dst.Is6())}
	}
	t.accepts = no
	passes = t.begin(c, packets{{src, t.dst}})
	if passes && c.Policy == drop {
		w := t.way(c, nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name})
		t.drop(w, t.accepts == no)
		return t.accepts != no
	}
	return passes || t.accepts != no
}

// drop records that a rule drops the packet.
func (t *Tracer) drop(w Way, certain bool) {
	w.Drops = true
	switch {
	case t.base.Hook.Type == "nat" && ofSources(t.base):
		t.out.Ways = append(t.out.Ways, w)
	case t.out.Dropped != nil:
	case certain:
		t.out.Dropped = &w
	case len(t.out.Drops) < maxDrops:
		t.out.Drops = append(t.out.Drops, w)
	}
}

func sameTarget(ways []Way) bool {
	first := ways[0]
	return !slices.ContainsFunc(ways, func(w Way) bool {
		return w.To != first.To || w.Masquerade != first.Masquerade || w.Keeps != first.Keeps || w.Drops != first.Drops
	})
}

func (t *Tracer) unknown(words ...string) {
	for _, w := range words {
		if len(t.out.Unknown) < maxUnknown && !slices.Contains(t.out.Unknown, w) {
			t.out.Unknown = append(t.out.Unknown, w)
		}
	}
}

// Bounds of what a trace reports.
const (
	maxWays    = 1000
	maxDrops   = 10
	maxUnknown = 100
	tooMany    = "too many rules to follow"
)

// see records what a rule does to the packet.
func (t *Tracer) see(s step) {
	nat := t.base.Hook.Type == "nat"
	switch {
	case s.verdict == unix.NFT_GOTO:
		return
	case s.rule.Exprs == nil: // of a chain that was not read
		t.accepts = max(t.accepts, maybe)
		if nat {
			t.unknown("the rules of chain " + nfnetlink.Printable(s.chain.Name) + ", which has too many to read")
		}
		return
	}
	t.write(s)
	if s.untracks && t.base.Hook.Priority < conntrackPriority && t.untracked != yes {
		by := t.way(s.chain, s.rule)
		t.untracked, t.by = either(s.certain, yes, maybe), &by
	}
	translates := t.translates(s.action)
	if nat && (translates || s.ends()) {
		t.unknown(s.open()...)
	}
	switch {
	case translates:
		t.add(s)
	case s.verdict == drop:
		t.drop(t.way(s.chain, s.rule), s.certain)
	case s.ends() && s.verdict != unix.NFT_RETURN: // accept, or queue
		t.accepts = max(t.accepts, either(s.certain && s.verdict == accept, yes, maybe))
	}
	if nat && s.leaves(len(s.via) == 0) && len(s.open()) == 0 {
		left := t.way(s.chain, s.rule)
		t.out.Left = &left
	}
	t.full = t.full || len(t.out.Ways) >= maxWays
}

// way returns the place of a rule of the current base chain, or of one that it leads to.
func (t *Tracer) way(c *Chain, r nfnetlink.Rule) Way {
	return Way{Place: t.place(r), Own: c.Own}
}

// conntrackPriority is that of connection tracking, NF_IP_PRI_CONNTRACK: what has
// passed it is tracked.
const conntrackPriority = -200

// write records what a rule writes into the header of the packet. Parts of an address, and
// what is not a constant, are unknown addresses.
func (t *Tracer) write(s step) {
	for _, to := range s.writes {
		w := t.way(s.chain, s.rule)
		w.Writes, w.To, w.Direct = true, iprange.Range{From: to.To, To: to.To}, s.direct
		switch of := fieldOf(to.Field); {
		case of == destination:
			w.Direct = w.Direct || s.certain
			t.out.Redirects = append(t.out.Redirects, w)
		case of != source:
		case s.certain && to.To.IsValid() && t.out.Through:
			t.written, t.maybe, t.out.Ways, t.facts.Src = &w, nil, nil, to.To
		case s.certain && to.To.IsValid():
			t.maybe, t.out.Ways = nil, []Way{w}
		default:
			t.maybe = &w
			t.unknown(s.open()...)
		}
	}
}

// add adds a rule that translates the packet.
func (t *Tracer) add(s step) {
	a := s.NAT
	w := t.way(s.chain, s.rule)
	w.To, w.Direct, w.Masquerade = a.To, s.direct, a.Masquerade
	w.Keeps = a.ToMap == "" && fieldOf(a.ToField) == source
	if a.ToMap != "" {
		var found truth
		if w.Among, found = t.toAddress(s.packets, s.rule, a); found == no {
			return
		}
		if len(w.Among) == 1 {
			w.To = iprange.Range{From: w.Among[0], To: w.Among[0]}
		}
	}
	t.out.Ways = append(t.out.Ways, w)
}
