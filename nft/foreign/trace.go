package foreign

import (
	"bytes"
	"cmp"
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

// A Packet is the first packet of a new connection. It has no mark of kube-proxy
// or the CNI plugin portmap; other marks are unknown.
type Packet struct {
	Src, Dst         netip.Addr // Src is the zero address if unknown
	SrcType, DstType int        // route types, such as unix.RTN_LOCAL; unix.RTN_UNSPEC if unknown
	FromNode         bool       // sent by the node itself, so that it has no In
	In, Out          Device
}

// A Trace is the effect of a hook's NAT chains on a packet.
type Trace struct {
	// Ways are the rules that may translate the packet, in the order in which it
	// reaches them. All but the last depend on a condition that is unknown; so
	// does the last one if Through is true.
	Ways    []Way
	Through bool     // it may also pass through untranslated
	Unknown []string // the unknown conditions, as nft writes them
	// Left is the last rule that certainly ended a base chain early for the packet.
	Left *Way
}

// A Way is a rule that translates a packet.
type Way struct {
	Rule     nfnetlink.Rule
	Base     string // the base chain from which it is reached
	Priority int32  // of the base chain
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

// Table returns the family and the name of the rule's table, as nft writes them.
func (w Way) Table() string { return Conflict{Rule: w.Rule}.Table() }

// Chain returns the name of the rule's chain.
func (w Way) Chain() string { return Conflict{Rule: w.Rule}.Chain() }

// RuleText returns the rule as text.
func (w Way) RuleText() string { return rule.String(w.Rule) }

// String returns the name for use in messages.
func (d Device) String() string { return nfnetlink.Printable(d.Name) }

// A Tracer follows packets through the NAT chains of a hook.
type Tracer struct {
	Snapshot
	hook   uint32
	chains map[id]*Chain
	// member reports whether a set contains an address.
	member      func(f nfnetlink.Family, table, set string, a netip.Addr) (bool, error)
	out         Trace
	packet      Packet
	base        nfnetlink.Chain
	left        bool     // accept ended the base chain early
	path        []string // unknown conditions on the way here
	rules       int      // the number of rules applied
	masqueraded bool
	direct      int // number of conditions on the way that name the destination
}

// A MapReader also reads single elements and verdict maps, like a [nfnetlink.Conn].
type MapReader interface {
	nfnetlink.Reader
	HasElement(f nfnetlink.Family, table, set string, a netip.Addr) (bool, error)
	MapElements(f nfnetlink.Family, table, set string, most int) ([]nfnetlink.MapElement, bool, error)
}

// NewTracer reads the NAT chains of a hook, such as unix.NF_INET_POST_ROUTING.
// known reports which chains need not be read because their effect is known: they
// masquerade the packet or return.
func NewTracer(c MapReader, hook uint32, known func(nfnetlink.Chain) bool) (*Tracer, error) {
	s, err := read(reader{
		conn: c, own: known, hook: hook,
		maps: func(r *reader) error { return r.readMaps(c) },
	})
	if err != nil {
		return nil, err
	}
	t := &Tracer{Snapshot: s, hook: hook, chains: map[id]*Chain{}, member: c.HasElement}
	for i := range s.Chains {
		t.chains[chainID(s.Chains[i].Chain)] = &t.Chains[i]
	}
	return t, nil
}

// readMaps reads the verdict maps that rules refer to. The targets of maps that
// are too large or have intervals are unknown.
func (r *reader) readMaps(c MapReader) error {
	tables := map[id]bool{}
	for want := range r.wanted {
		tables[id{want.family, want.table, ""}] = true
	}
	r.Snapshot.maps = map[id][]nfnetlink.MapElement{}
	for t := range tables {
		sets, err := c.Sets(t.family, t.table)
		if err != nil && !nfnetlink.IsNotExist(err) {
			return err
		}
		for _, s := range sets {
			name := id{s.Family, s.Table, s.Name}
			if !r.wanted[name] || s.Flags&unix.NFT_SET_MAP == 0 || s.Flags&unix.NFT_SET_INTERVAL != 0 {
				continue
			}
			elements, more, err := c.MapElements(s.Family, s.Table, s.Name, maxRules)
			if err != nil && !nfnetlink.IsNotExist(err) {
				return err
			}
			if !more {
				r.Snapshot.maps[name] = slices.Clip(elements)
			}
		}
	}
	return nil
}

// Trace follows a packet through the base chains in the kernel's order: by
// priority. Of chains with equal priority the one registered last runs first, but
// the kernel does not report the order: if several of them translate the packet,
// any of them may be first.
//
// masqueraded is the effect of the known chains.
func (t *Tracer) Trace(p Packet, masqueraded bool) Trace {
	t.packet, t.out, t.rules, t.masqueraded = p, Trace{Through: true}, 0, masqueraded
	var bases []*Chain
	for i := range t.Chains {
		c := &t.Chains[i]
		if c.Hook != nil && (c.Family == nfnetlink.Inet || (c.Family == nfnetlink.IPv6) == p.Dst.Is6()) {
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
	t.out.Unknown = slices.Compact(t.out.Unknown)
	return t.out
}

// equals follows the packet through base chains of equal priority.
func (t *Tracer) equals(bases []*Chain) {
	before, through, translating := len(t.out.Ways), true, 0
	for _, c := range bases {
		t.base, t.left = c.Chain, false
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
		if !slices.Contains(t.out.Unknown, w) {
			t.out.Unknown = append(t.out.Unknown, w)
		}
	}
}

// walk follows the packet through a chain, and reports whether it may reach the
// end of the chain or return.
func (t *Tracer) walk(c *Chain, on []id) (back bool) {
	if c == nil || slices.Contains(on, chainID(c.Chain)) || len(on) > maxDepth {
		return true
	}
	if t.rules += len(c.Rules); t.rules > maxRules {
		t.unknown("too many rules to follow")
		return true
	}
	if c.Own {
		if t.masqueraded {
			t.out.Ways = append(t.out.Ways, Way{
				Rule: nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}, Base: t.base.Name, Priority: t.base.Hook.Priority,
				Masquerade: true, Own: true,
			})
		}
		return !t.masqueraded
	}
	if c.Unread {
		t.unknown("the rules of chain " + nfnetlink.Printable(c.Name) + ", which has too many to read")
		return true
	}
	on = append(slices.Clip(on), chainID(c.Chain))
	for _, r := range c.Rules {
		sure, comesBack, stop := t.rule(c, r, on)
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
	matches, words, to, direct := yes, []string(nil), rule.Statement{}, 0
	var targets []target
	for s := range rule.Statements(r) {
		if a.take(s) {
			if a.rewrites || a.redirects {
				to = s
			}
			continue
		}
		var truth truth
		if s.Expr.JumpsByMap() {
			a.byMap = true
			targets, truth = t.lookup(c, s)
		} else {
			truth = t.packet.holds(c, s, r, t.member)
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
	translates := a.rewrites && t.hook == unix.NF_INET_POST_ROUTING || a.redirects && t.hook != unix.NF_INET_POST_ROUTING
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
		found := t.add(r, a, to)
		return sure && found == yes, false, found != no
	case a.byMap:
		for _, target := range targets {
			back, stops := t.follow(c, target.code, target.chain, on)
			comesBack, stop = comesBack || stops && back, stops && len(targets) == 1
		}
		return sure && len(targets) == 1, comesBack, stop
	}
	if sure && len(t.path) == 0 && a.leaves(len(on) == 1) {
		t.out.Left = &Way{Rule: r, Base: t.base.Name, Priority: t.base.Hook.Priority}
	}
	back, stops := t.follow(c, a.verdict, a.target, on)
	return sure, stops && back, stops
}

// A target is a verdict in a map.
type target struct {
	code  int32
	chain string
}

// follow applies a verdict. It reports whether the packet may return from this
// chain, and whether it stops there.
func (t *Tracer) follow(c *Chain, code int32, chain string, on []id) (back, stop bool) {
	switch code {
	case unix.NFT_RETURN:
		return true, true
	case accept:
		t.left = true
		return false, true
	case 0: // NF_DROP
		t.out.Ways = append(t.out.Ways, Way{Drops: true, Base: t.base.Name, Priority: t.base.Hook.Priority, Rule: nfnetlink.Rule{Family: c.Family, Table: c.Table, Chain: c.Name}})
		return false, true
	case unix.NFT_JUMP, unix.NFT_GOTO:
		back := t.walk(t.chains[id{c.Family, c.Table, chain}], on)
		if code == unix.NFT_GOTO {
			return back, true
		}
		return false, !back
	}
	return false, false
}

// add adds a rule that translates the packet, and reports whether it does so: if its
// map has no address for the packet, the packet continues after the rule.
func (t *Tracer) add(r nfnetlink.Rule, a action, s rule.Statement) truth {
	w := Way{
		Rule: r, Base: t.base.Name, Priority: t.base.Hook.Priority, To: s.To, Direct: t.direct > 0, Masquerade: a.rewrites && !a.fixed,
		Keeps: s.ToMap == "" && (s.ToField == "ip saddr" || s.ToField == "ip6 saddr"),
	}
	found := yes
	if elements, read := t.maps[id{r.Family, r.Table, s.ToMap}]; s.ToMap != "" && read {
		if w.Among, found = t.packet.among(s, elements); found == no {
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
func (p Packet) among(s rule.Statement, elements []nfnetlink.MapElement) (all []netip.Addr, found truth) {
	var from netip.Addr
	switch s.ToField {
	case "ip saddr", "ip6 saddr":
		from = p.Src
	case "ip daddr", "ip6 daddr":
		from = p.Dst
	}
	key := from.AsSlice()
	for i := range min(len(key), len(s.ToMask)) {
		key[i] &= s.ToMask[i]
	}
	for _, e := range elements {
		if value, ok := netip.AddrFromSlice(e.Value); ok && (key == nil || bytes.Equal(key, e.Key)) {
			all = append(all, value)
		}
	}
	keys := 1 // that there can be
	for _, b := range s.ToMask {
		for ; b != 0 && keys <= len(elements); b &= b - 1 {
			keys *= 2
		}
	}
	switch every := s.ToMask != nil && len(elements) >= keys; {
	case len(all) == 0:
		return nil, no
	case key != nil || every: // elements have keys that differ
		found = yes
	default:
		found = maybe
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), found
}
