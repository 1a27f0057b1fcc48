package foreign

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Device is a network interface. The zero value is an unknown one.
type Device struct {
	Name  string
	Index uint32
}

// A Packet is the first packet of a new connection. It comes without the bits of the
// mark that are Unset; kube-proxy's and portmap's are always among them. Other marks
// are unknown, until a rule sets them.
type Packet struct {
	Src, Dst         netip.Addr // Src is the zero address if unknown
	SrcType, DstType int        // route types, such as unix.RTN_LOCAL; unix.RTN_UNSPEC if unknown
	FromNode         bool       // sent by the node itself, so that it has no In
	In, Out          Device
	Unset            uint32

	mark      marking
	rewritten *Way  // a rule writes into its header
	untracked truth // connection tracking is off for it
	by        *Way  // by this rule
	dropped   *Way  // the rule that drops it
}

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
	// translate sources.
	Dropped *Way
	// Packet is as these chains leave it.
	Packet Packet
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
	// Direct means that a condition leading to the rule names the packet's
	// destination: only then is the rule known to be for this address.
	Direct bool
	// Own means that the rule is in a chain that was not read; see [NewTracer].
	Own bool
}

// String returns the name for use in messages.
func (d Device) String() string { return nfnetlink.Printable(d.Name) }

// A Tracer follows packets through the chains of some hooks. Only chains of type nat
// translate; of the others only marks and the end of connection tracking count.
type Tracer struct {
	Snapshot
	hooks       []uint32
	chains      map[id]*Chain
	conn        *nfnetlink.Conn
	out         Trace
	packet      Packet
	base        nfnetlink.Chain
	left        bool     // accept ended the base chain early
	doubt       bool     // the packet may have left the base chain before
	path        []string // unknown conditions on the way here
	rules       int      // the number of rules applied, and what reading their maps costs
	masqueraded bool
	direct      int // number of conditions on the way that name the destination
}

// NewTracer reads the chains of some hooks, in the order in which a packet passes
// them, such as unix.NF_INET_POST_ROUTING. known reports which chains need not be
// read because their effect is known: they masquerade the packet or return.
func NewTracer(ctx context.Context, c *nfnetlink.Conn, known func(nfnetlink.Chain) bool, hooks ...uint32) (*Tracer, error) {
	s, err := read(reader{ctx: ctx, conn: c, own: known, hooks: hooks, tracing: true})
	if err != nil {
		return nil, err
	}
	return &Tracer{Snapshot: s, hooks: hooks, chains: s.byID(), conn: c}, nil
}

// Trace follows a packet through the base chains in the kernel's order: by
// priority. Of chains with equal priority the one registered last runs first, but
// the kernel does not report the order: if several of them translate the packet,
// any of them may be first.
//
// masqueraded is the effect of the known chains.
func (t *Tracer) Trace(p Packet, masqueraded bool) Trace {
	t.packet, t.out, t.rules, t.masqueraded = p, Trace{Through: true}, 0, masqueraded
	for _, hook := range t.hooks {
		t.atHook(hook)
	}
	switch t.packet.untracked {
	case yes:
		t.out.Untracked = t.packet.by
	case maybe:
		if t.out.Through = true; len(t.out.Ways) > 0 {
			t.unknown("whether connection tracking is off, by " + t.packet.by.RuleText())
		}
	case no:
	}
	last := t.hooks[len(t.hooks)-1]
	if w := t.packet.rewritten; w != nil && (last == unix.NF_INET_POST_ROUTING || last == unix.NF_INET_LOCAL_IN) {
		t.out.Through = true
		t.out.Ways = append(t.out.Ways, *w)
		t.unknown("what that rule writes into the packet")
	}
	t.out.Dropped, t.out.Packet = t.packet.dropped, t.packet
	return t.out
}

func (t *Tracer) atHook(hook uint32) {
	var bases []*Chain
	for i := range t.Chains {
		c := &t.Chains[i]
		if c.Hook != nil && c.Hook.Number == hook && (c.Family == nfnetlink.Inet || (c.Family == nfnetlink.IPv6) == t.packet.Dst.Is6()) {
			bases = append(bases, c)
		}
	}
	slices.SortStableFunc(bases, func(a, b *Chain) int { return cmp.Compare(a.Hook.Priority, b.Hook.Priority) })
	for len(bases) > 0 && t.out.Through {
		n := 1
		for n < len(bases) && bases[n].Hook.Priority == bases[0].Hook.Priority {
			n++
		}
		t.equals(bases[:n])
		bases = bases[n:]
	}
}

// equals follows the packet through base chains of equal priority.
func (t *Tracer) equals(bases []*Chain) {
	before, through, translating := len(t.out.Ways), true, 0
	for _, c := range bases {
		t.base, t.left, t.doubt = c.Chain, false, false
		switch {
		case c.Hook.Type != "nat":
			out, rules := t.out, t.rules
			t.walk(c, nil)
			t.out, t.rules = out, rules // such a chain does not translate
			continue
		case t.packet.untracked == yes:
			continue
		}
		n := len(t.out.Ways)
		passes := t.walk(c, nil) || t.left
		through = through && passes
		if len(t.out.Ways) > n {
			translating++
		}
	}
	t.out.Through = through
	if translating > 1 && !sameTarget(t.out.Ways[before:]) {
		t.unknown("which of the chains of equal priority was registered last")
	}
}

func sameTarget(ways []Way) bool {
	return !slices.ContainsFunc(ways, func(w Way) bool {
		return w.To != ways[0].To || w.Masquerade != ways[0].Masquerade || w.Keeps != ways[0].Keeps || w.Drops != ways[0].Drops
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
	maxUnknown = 100
	tooMany    = "too many rules to follow"
)

// walk follows the packet through a chain, and reports whether it may reach the
// end of the chain or return.
func (t *Tracer) walk(c *Chain, on []id) (back bool) {
	if c == nil || slices.Contains(on, chainID(c.Chain)) || len(on) > maxDepth {
		return true
	}
	if c.Own {
		if t.masqueraded {
			t.out.Ways = append(t.out.Ways, Way{Place: t.place(ruleOf(c)), Masquerade: true, Own: true})
		}
		return !t.masqueraded
	}
	if c.Unread {
		t.unknown("the rules of chain " + nfnetlink.Printable(c.Name) + ", which has too many to read")
		return true
	}
	on = append(slices.Clip(on), chainID(c.Chain))
	for _, r := range c.Rules {
		if t.rules++; t.rules > maxRules || len(t.out.Ways) >= maxWays {
			t.out.Unknown = append([]string{tooMany}, slices.DeleteFunc(t.out.Unknown, func(s string) bool { return s == tooMany })...)
			return true
		}
		sure, comesBack, stop := t.rule(c, r, on)
		t.doubt = t.doubt || stop && !sure
		back = back || comesBack
		if sure && stop {
			return back
		}
	}
	return true
}

// rule applies a rule. stop means that a matching packet does not continue in the
// chain, and comesBack that it may return from the chain.
func (t *Tracer) rule(c *Chain, r nfnetlink.Rule, on []id) (sure, comesBack, stop bool) {
	a := action{verdict: unix.NFT_CONTINUE}
	matches, words, direct := yes, []string(nil), 0
	var targets []target
	for s := range rule.Statements(r) {
		t.change(r, s, matches == yes && len(t.path) == 0 && !t.doubt)
		if a.take(s) {
			continue
		}
		var truth truth
		if s.Expr.JumpsByMap() {
			targets, truth = t.lookup(c, s)
		} else {
			truth = t.holds(c, s)
		}
		if truth == no {
			return false, false, false
		}
		if truth == maybe {
			matches, words = maybe, append(words, s.String())
		}
		if strings.Contains(s.Field, "daddr") && s.Op == "==" && s.Field != "fib daddr type" || s.Expr.JumpsByMap() && strings.Contains(s.String(), "daddr") {
			direct++
		}
	}
	sure = matches == yes
	translates := t.translates(a)
	if !translates && a.verdict == unix.NFT_CONTINUE && !a.byMap {
		return false, false, false
	}
	n := len(t.path)
	t.path = append(t.path, words...)
	t.direct += direct
	defer func() { t.path, t.direct = t.path[:n], t.direct-direct }()
	if translates || a.verdict == unix.NFT_RETURN || a.verdict == accept {
		t.unknown(t.path...)
	}
	switch {
	case translates:
		found := t.add(r, a)
		return sure && found == yes, false, found != no
	case !a.byMap:
		targets = []target{{a.verdict, a.target}}
	}
	switch certain := sure && len(t.path) == 0; {
	case certain && a.leaves(len(on) == 1):
		t.out.Left = &Way{Place: t.place(r)}
	case certain && a.verdict == drop && !t.doubt && !t.ofSources() && t.packet.dropped == nil:
		t.packet.dropped = &Way{Place: t.place(r)}
	}
	for _, to := range targets {
		back, stops := t.follow(c, to, on)
		comesBack, stop = comesBack || stops && back, stops && len(targets) == 1
	}
	return sure && len(targets) == 1, comesBack, stop
}

// place returns the place of a rule of the current base chain, or of one that it
// leads to.
func (t *Tracer) place(r nfnetlink.Rule) Place {
	return Place{r, t.base.Name, t.base.Hook.Priority}
}

// ruleOf stands for all rules of a chain.
func ruleOf(c *Chain) nfnetlink.Rule {
	return nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}
}

// ofSources reports whether the base chain translates sources: those of type nat at
// other hooks translate destinations.
func (t *Tracer) ofSources() bool {
	h := t.base.Hook
	return h.Type == "nat" && (h.Number == unix.NF_INET_POST_ROUTING || h.Number == unix.NF_INET_LOCAL_IN)
}

// translates reports whether an action translates the packet in this base chain.
func (t *Tracer) translates(a action) bool {
	switch {
	case t.base.Hook.Type != "nat", a.Family != 0 && (a.Family == nfnetlink.IPv6) != t.packet.Dst.Is6():
		return false
	case t.ofSources():
		return a.Source
	}
	return a.Destination
}

// rewrites reports whether an expression writes into the source address.
func (p Packet) rewrites(e nfnetlink.Expr) bool {
	at, size := uint32(12), uint32(4) // RFC 791, section 3.1
	if p.Dst.Is6() {
		at, size = 8, 16 // RFC 8200, section 3
	}
	from := e.Uint32(unix.NFTA_PAYLOAD_OFFSET)
	return e.Name == "payload" && e.Uint32(unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_NETWORK_HEADER &&
		from < at+size && from+e.Uint32(unix.NFTA_PAYLOAD_LEN) > at
}

// conntrackPriority is that of connection tracking, NF_IP_PRI_CONNTRACK: what has
// passed it is tracked.
const conntrackPriority = -200

func (t *Tracer) change(r nfnetlink.Rule, s rule.Statement, sure bool) {
	if s.NewMark != nil {
		t.packet.mark = t.packet.mark.set(*s.NewMark, sure)
	}
	if t.packet.rewrites(s.Expr) {
		t.packet.rewritten = &Way{Place: t.place(r)}
	}
	if !rule.Untracks(s.Expr) || t.base.Hook.Priority >= conntrackPriority || t.packet.untracked == yes {
		return
	}
	t.packet.untracked = maybe
	if sure {
		t.packet.untracked = yes
	}
	t.packet.by = &Way{Place: t.place(r)}
}

// A target is a verdict in a map.
type target struct {
	code  int32
	chain string
}

// follow applies a verdict. It reports whether the packet may return from this
// chain, and whether it stops there.
func (t *Tracer) follow(c *Chain, to target, on []id) (back, stop bool) {
	switch to.code {
	case unix.NFT_RETURN:
		return true, true
	case accept:
		t.left = true
		return false, true
	case drop:
		t.out.Ways = append(t.out.Ways, Way{Place: t.place(ruleOf(c)), Drops: true})
		return false, true
	case unix.NFT_JUMP, unix.NFT_GOTO:
		back := t.walk(t.chains[id{c.Family, c.Table, to.chain}], on)
		if to.code == unix.NFT_GOTO {
			return back, true
		}
		return false, !back
	}
	return false, false
}

// add adds a rule that translates the packet, and reports whether it does so: if its
// map has no address for the packet, the packet continues after the rule.
func (t *Tracer) add(r nfnetlink.Rule, a action) truth {
	w := Way{
		Place: t.place(r), To: a.To, Direct: t.direct > 0, Masquerade: a.Masquerade,
		Keeps: a.ToMap == "" && (a.ToField == "ip saddr" || a.ToField == "ip6 saddr"),
	}
	found := yes
	if m, read := t.maps[id{r.Family, r.Table, a.ToMap}]; a.ToMap != "" && read {
		t.rules += len(m.elements) / elementsPerRule
		if w.Among, found = t.packet.among(a.NAT, m); found == no {
			return no
		}
		if len(w.Among) == 1 {
			w.To = iprange.Range{From: w.Among[0], To: w.Among[0]}
		}
	}
	t.out.Ways = append(t.out.Ways, w)
	return found
}

// among returns the addresses that a map may have for the packet, sorted, and whether
// it has one.
func (p Packet) among(n rule.NAT, m mapping) (all []netip.Addr, found truth) {
	candidates, found := p.candidates([]string{n.ToField}, n.ToMask, m)
	for _, e := range candidates {
		if value, ok := netip.AddrFromSlice(e.Value()); ok {
			all = append(all, value)
		}
	}
	keys := 1 // that there can be
	for _, b := range n.ToMask {
		for ; b != 0 && keys <= len(m.elements); b &= b - 1 {
			keys *= 2
		}
	}
	limited := slices.ContainsFunc(candidates, func(e nfnetlink.Element) bool { return e.Limited })
	if n.ToMask != nil && len(candidates) >= keys && !limited {
		found = yes
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), found
}
