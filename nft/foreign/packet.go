package foreign

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Device is a network interface. The zero value is an unknown one.
type Device struct {
	Name  string
	Index uint32
}

// String returns the name for use in messages.
func (d Device) String() string { return nfnetlink.Printable(d.Name) }

// A Packet is the first packet of a new connection. It comes without the bits of the
// mark that are Unset; kube-proxy's and portmap's are always among them. Other marks
// are unknown, until a rule sets them.
type Packet struct {
	Src, Dst         netip.Addr      // Src is the zero address if unknown
	From             []iprange.Range // what an unknown Src is among; nil: any
	SrcType, DstType int             // route types, such as unix.RTN_LOCAL; unix.RTN_UNSPEC if unknown
	FromNode         bool            // sent by the node itself, so that it has no In
	In, Out          Device
	Unset            uint32

	// any means that it may belong to any connection that needs masquerading: not one
	// to an address of this node or out of the loopback device.
	any bool
	// marked means that it may have kube-proxy's and portmap's marks.
	marked bool
	// origin is the interfaces on which it may have been received, nil: any.
	origin nft.Names
	// What rules have done to it.
	mark      marking
	untracked truth // connection tracking is off for it
	by        *Way  // by this rule
	written   *Way  // the rule that certainly writes this source into it
	maybe     *Way  // the last one that may write another
	dropped   *Way  // the rule that drops it
	drops     []Way // rules that may drop it
}

// Bits of the packet mark with which these programs mark what they will
// masquerade: kube-proxy's default, and that of the CNI plugin portmap.
const (
	kubeProxyMark = 0x4000
	portmapMark   = 0x2000
)

// A truth is whether packets satisfy a condition.
type truth int

const (
	no truth = iota
	maybe
	yes
)

func truthOf(b bool) truth {
	if b {
		return yes
	}
	return no
}

func (t truth) is(positive bool) truth {
	if positive {
		return t
	}
	return yes - t
}

// bits is a comparison of some bits of a number, such as the packet's mark.
type bits struct {
	mask, value uint32
	not         bool
}

const allBits = 0xffffffff

// bitsOf decodes the comparison of a statement.
func bitsOf(s rule.Statement) (b bits, ok bool) {
	if s.Set != "" || len(s.Value) != 4 || s.Mask != nil && len(s.Mask) != 4 || s.Op != "==" && s.Op != "!=" {
		return bits{}, false
	}
	b = bits{allBits, binary.NativeEndian.Uint32(s.Value), s.Op == "!="}
	if s.Mask != nil {
		b.mask = binary.NativeEndian.Uint32(s.Mask)
	}
	return b, true
}

// of evaluates a comparison of a number of which some bits are known.
func (b bits) of(value, known uint32) truth {
	switch {
	case (value^b.value)&known&b.mask != 0, b.value&^b.mask != 0:
		return no.is(!b.not)
	case b.mask&^known == 0:
		return yes.is(!b.not)
	}
	return maybe
}

// number evaluates a comparison of a number that is known or not.
func number(s rule.Statement, value, known uint32) truth {
	if b, ok := bitsOf(s); ok {
		return b.of(value, known)
	}
	return maybe
}

// A marking is what is known of a packet's mark: the bits that are known, their
// value, and those that a rule may have changed.
type marking struct{ known, value, changed uint32 }

// set returns the marking after a rule that sets the mark, or may do so.
func (m marking) set(to rule.NewMark, sure bool) marking {
	known := (^to.Keep | m.known) &^ to.Unknown
	value := (m.value&to.Keep ^ to.Xor) & known
	changed := m.changed | ^to.Keep&^known | to.Xor | to.Unknown | value&^m.value
	if !sure {
		known &= m.known &^ (value ^ m.value)
	}
	return marking{known, value & known, changed}
}

// lose returns the marking after rules that may have changed some bits.
func (m marking) lose(bits uint32) marking {
	return marking{m.known &^ bits, m.value &^ bits, m.changed | bits}
}

// marked evaluates a comparison of the mark in a chain.
func (w *walker) marked(c *Chain, b bits) truth {
	unset := w.facts.Unset
	if !w.facts.marked {
		unset |= kubeProxyMark | portmapMark
		if c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy" {
			unset |= b.mask // its bit is configurable, the names of its chains are not
		}
	}
	return b.of(w.mark.value, w.mark.known|unset&^w.mark.changed)
}

// device returns the interface that a field is about, and whether it is known. A
// packet sent by the node was received on one without a name.
func (p Packet) device(field string) (d Device, known bool) {
	switch {
	case strings.HasPrefix(field, "oif"):
		return p.Out, p.Out.Name != ""
	case p.FromNode:
		return Device{}, true
	}
	return p.In, p.In.Name != ""
}

// onDevice evaluates a comparison of an interface.
func (p Packet) onDevice(s rule.Statement) truth {
	d, known := p.device(s.Field)
	switch {
	case !strings.HasSuffix(s.Field, "name") && !p.any:
		return number(s, d.Index, either[uint32](known, allBits, 0))
	case s.Set != "" || s.Mask != nil || s.Op != "==" && s.Op != "!=":
		return maybe
	case strings.HasPrefix(s.Field, "oif") && p.any && lastWord(s) == `"lo"`:
		return no.is(s.Op == "==")
	case p.any && strings.HasSuffix(s.Field, "if"):
		return maybe
	}
	return p.named(s.Field, s.Value).is(s.Op == "==")
}

// named reports whether an interface has a name or, if that is not zero-terminated,
// one that begins with it.
func (p Packet) named(field string, value []byte) truth {
	d, known := p.device(field)
	name, _, whole := bytes.Cut(value, []byte{0})
	if !known && field == "iifname" && p.origin != nil {
		is := nft.Names{{Name: string(name) + either(whole, "", "*"), In: true}}
		return either(len(p.origin.And(is)) == 0, no, either(len(p.origin.Minus(is)) == 0, yes, maybe))
	}
	if !known {
		return maybe
	}
	return truthOf(string(name) == d.Name || !whole && strings.HasPrefix(d.Name, string(name)))
}

// ofType evaluates a comparison of the type of an address.
func (p Packet) ofType(s rule.Statement, typ int) truth {
	if b, ok := bitsOf(s); p.any && ok && strings.HasPrefix(s.Field, "fib daddr") && b.value == unix.RTN_LOCAL {
		return no.is(!b.not)
	}
	return number(s, uint32(typ), either[uint32](typ != unix.RTN_UNSPEC, allBits, 0))
}

// dstNAT is IPS_DST_NAT: the destination was translated. A packet that comes back to its
// source passes the node for no other reason.
const dstNAT = 1 << 5

// connection evaluates a comparison of the state of a connection: that of a new one is
// known.
func (p Packet) connection(s rule.Statement, value uint32) truth {
	const known = 1 | 2 | 4 | 8 | 16 | 32 | 64
	return number(s, value, either[uint32](p.any, 0, known))
}

// A match is which packets a rule matches: those from some addresses to some addresses
// for which all other conditions hold.
type match struct {
	src, dst   []iprange.Range // nil: any
	truth      truth           // of the other conditions
	conditions []condition
	direct     bool
}

// open reports whether some of the packets at hand may not match.
func (m match) open() bool {
	return m.truth != yes || slices.ContainsFunc(m.conditions, func(c condition) bool { return c.open })
}

// add adds a condition.
func (m *match) add(s rule.Statement, t truth, of field) {
	if m.truth = min(m.truth, t); t == maybe {
		m.conditions = append(m.conditions, newCondition(s, of, true))
	}
}

// parse returns which packets a rule matches, and what it does. It follows the changes
// of their mark.
func (w *walker) parse(c *Chain, r nfnetlink.Rule, p *path) (match, action) {
	m, a := match{truth: yes}, action{verdict: unix.NFT_CONTINUE}
	added := "" // the set to which the rule has added the packet
	for s := range rule.Statements(r) {
		if s.NewMark != nil && len(p.in(m.src, m.dst)) > 0 {
			w.mark = w.mark.set(*s.NewMark, !m.open() && w.certain(*p))
			w.marks |= ^s.NewMark.Keep | s.NewMark.Xor | s.NewMark.Unknown
		}
		if s.Expr.Name == "dynset" {
			added = s.Expr.Str(unix.NFTA_DYNSET_SET_NAME)
		}
		if a.take(s) || added != "" && s.Set == added && s.Op == "==" && w.toItself(s) {
			continue
		}
		if w.compare(c, s, p, &m); m.truth == no {
			return m, a
		}
	}
	if a.NAT.Family != 0 && r.Family == nfnetlink.Inet {
		w.restrict(&m, rule.Statement{Field: "nat", Op: "=="}, p, anywhere(a.NAT.Family), destination)
	}
	return m, a
}

// toItself reports whether a statement looks up the source and the destination, and they are
// the same: our rule for hairpins adds the source as both.
func (w *walker) toItself(s rule.Statement) bool {
	return w.facts.Src == w.facts.Dst && (s.Field == "ip saddr . ip daddr" || s.Field == "ip6 saddr . ip6 daddr")
}

// dynsetExpressions is NFTA_DYNSET_EXPRESSIONS, which x/sys/unix lacks.
const dynsetExpressions = 10

// take adds the effect of a statement, and reports whether the statement is an
// action rather than a comparison.
func (a *action) take(s rule.Statement) bool {
	code, chain, ends := s.Expr.Verdict()
	switch {
	case ends:
		a.target, a.verdict = chain, code
		return true
	case s.Source || s.Destination:
		a.NAT = s.NAT
		return true
	case s.Expr.JumpsByMap():
		a.byMap = &s
		return true
	case s.Write.Field != "":
		a.writes = append(a.writes, s.Write)
		return true
	case rule.Untracks(s.Expr):
		a.untracks = true
		return true
	}
	switch s.Expr.Name {
	case "dynset": // can have a limit or a quota
		return s.Expr.Attr(unix.NFTA_DYNSET_EXPR) == nil && s.Expr.Attr(dynsetExpressions) == nil
	case "counter", "log", "meta", "ct", "notrack", "payload", "target":
		return true
	case "objref":
		return s.Expr.Uint32(unix.NFTA_OBJREF_IMM_TYPE) == unix.NFT_OBJECT_COUNTER
	case "match":
		return s.Expr.Str(unix.NFTA_MATCH_NAME) == "comment"
	}
	return false
}

// compare adds a comparison.
func (w *walker) compare(c *Chain, s rule.Statement, p *path, m *match) {
	facts := w.facts
	switch s.Field {
	case "ip saddr", "ip6 saddr":
		if addresses := w.addresses(c, s, p); addresses != nil || s.Set != "" {
			w.restrict(m, s, p, addresses, source)
			return
		}
		m.add(s, maybe, other)
	case "ip daddr", "ip6 daddr":
		m.direct = m.direct || s.Op == "=="
		w.restrict(m, s, p, w.addresses(c, s, p), destination)
	case "meta nfproto", "meta protocol":
		families := map[string]nfnetlink.Family{"ipv4": nfnetlink.IPv4, "ip": nfnetlink.IPv4, "ipv6": nfnetlink.IPv6, "ip6": nfnetlink.IPv6}
		family, known := families[lastWord(s)]
		switch {
		case s.Set != "" || s.Mask != nil || s.Op != "==" && s.Op != "!=":
			m.add(s, maybe, other)
		case known:
			w.restrict(m, s, p, anywhere(family), destination)
		default:
			m.add(s, no.is(s.Op == "=="), other)
		}
	case "iifname", "oifname", "iif", "oif":
		m.add(s, facts.onDevice(s), device)
	case "fib saddr type":
		m.add(s, facts.ofType(s, facts.SrcType), source)
	case "fib daddr type":
		m.add(s, facts.ofType(s, facts.DstType), other)
	case "ct state":
		const isNew = 8 // NF_CT_STATE_BIT(IP_CT_NEW) of nft
		m.add(s, facts.connection(s, isNew), other)
	case "ct status":
		m.add(s, facts.connection(s, either[uint32](facts.Src == facts.Dst, dstNAT, 0)), other)
	case "meta mark":
		t := maybe
		if b, ok := bitsOf(s); ok {
			t = w.marked(c, b)
		}
		m.add(s, t, other)
	default:
		m.add(s, maybe, other)
	}
}

func lastWord(s rule.Statement) string {
	words := s.String()
	return words[strings.LastIndexByte(words, ' ')+1:]
}

// addresses returns those that a statement compares an address with, nil if they are
// unknown.
func (w *walker) addresses(c *Chain, s rule.Statement, p *path) []iprange.Range {
	if r, ok := s.Range(); ok {
		return []iprange.Range{r}
	}
	if s.Set == "" || s.Mask != nil {
		return nil
	}
	a, single := p.single(strings.HasSuffix(s.Field, "saddr"))
	if w.conn == nil || !single {
		content := w.sets[id{c.Family, c.Table, s.Set}]
		if w.work += len(content); w.spent() && len(content) > maxNamed {
			return nil
		}
		return content
	}
	if a.Is6() != strings.HasPrefix(s.Field, "ip6 ") {
		return nil
	}
	switch in, limited, err := w.conn.HasElement(c.Family, c.Table, s.Set, a); {
	case err != nil || limited:
		return nil
	case in:
		return []iprange.Range{{From: a, To: a}}
	}
	return []iprange.Range{}
}

// single returns the only source or destination of packets, if there is only one.
func (p packets) single(source bool) (netip.Addr, bool) {
	src, dst := p.addresses()
	of := either(source, src, dst)
	return of[0].From, len(of) == 1 && of[0].From == of[0].To
}

// restrict narrows a match to the given addresses, or to all others; nil: to some.
func (w *walker) restrict(m *match, s rule.Statement, p *path, addresses []iprange.Range, of field) {
	at := either(of == source, &m.src, &m.dst)
	set := *at
	if set == nil {
		set = anywhere(nfnetlink.Inet)
	}
	switch { // nft checks the family first
	case strings.HasPrefix(s.Field, "ip6 "):
		set = iprange.Intersect(set, anywhere(nfnetlink.IPv6))
	case strings.HasPrefix(s.Field, "ip "):
		set = iprange.Intersect(set, anywhere(nfnetlink.IPv4))
	}
	switch {
	case addresses == nil:
	case s.Op == "!=":
		set = iprange.Subtract(set, addresses)
	default:
		set = iprange.Intersect(set, addresses)
	}
	if *at = set; len(set) == 0 {
		m.truth = no
		return
	}
	open := addresses == nil
	if w.conn != nil && !open {
		src, dst := p.addresses()
		open = !covers(set, either(of == source, src, dst))
	}
	if addresses == nil {
		m.truth = maybe
	}
	if of == source || open {
		m.conditions = append(m.conditions, newCondition(s, of, open || w.conn == nil))
	}
}

func newCondition(s rule.Statement, of field, open bool) condition {
	return condition{s.String(), either(of == source, sourceWords(s), ""), of, open}
}

// sourceWords returns the source that a statement matches, as text.
func sourceWords(s rule.Statement) string {
	words := strings.TrimPrefix(strings.TrimPrefix(s.String(), s.Field+" "), "!= ")
	if strings.HasPrefix(s.Field, "fib") {
		if words = "addresses of type " + lastWord(s); strings.EqualFold(lastWord(s), "local") {
			words = "this node"
		}
	}
	if s.Op == "!=" {
		return "not " + words
	}
	return words
}

// A verdict is an element of a verdict map, and the packets that it is for.
type verdict struct {
	match
	nfnetlink.MapElement
}

// lookup returns the verdicts that a map may have for packets. unread means that they are
// not known.
func (w *walker) lookup(c *Chain, s rule.Statement, q path) (found []verdict, unread bool) {
	m, ok := w.maps[id{c.Family, c.Table, s.Expr.Str(unix.NFTA_LOOKUP_SET)}]
	if w.steps += len(m.elements) / elementsPerRule; !ok || w.spent() {
		return nil, true
	}
	fields, _, _ := strings.Cut(s.String(), " vmap @")
	for _, e := range w.candidates(strings.Split(fields, " . "), nil, m, q.packets) {
		if e.truth != yes {
			e.conditions = []condition{newCondition(s, other, true)}
		} else if w.conn == nil || len(q.without(box{e.src, e.dst})) > 0 {
			e.conditions = []condition{newCondition(s, destination, true)}
		}
		e.direct = strings.Contains(fields, "daddr")
		found = append(found, e)
	}
	return found, false
}

// anyVerdict returns the verdicts that an unread map may have: any, and a jump to any
// chain of the table that is not a base chain.
func (w *walker) anyVerdict(c *Chain, s rule.Statement) []verdict {
	m := match{truth: maybe, conditions: []condition{newCondition(s, other, true)}}
	found := []verdict{{m, nfnetlink.MapElement{Code: unix.NFT_RETURN}}, {m, nfnetlink.MapElement{Code: accept}}}
	for _, to := range w.Chains {
		if to.Hook == nil && to.Family == c.Family && to.Table == c.Table {
			found = append(found, verdict{m, nfnetlink.MapElement{Code: unix.NFT_JUMP, Chain: to.Name}})
		}
	}
	return found
}

// elementsPerRule is how many elements of a map take as long to compare as a rule.
const elementsPerRule = 50

// A mapping is the content of a map. In one of intervals, an element is the first key
// of an interval, and End marks the key after the last.
type mapping struct {
	elements []nfnetlink.MapElement // sorted by key
	interval bool
}

func newMapping(elements []nfnetlink.MapElement, interval bool) mapping {
	slices.SortFunc(elements, func(a, b nfnetlink.MapElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.End == b.End {
			return c
		}
		return either(a.End, -1, 1)
	})
	return mapping{slices.Clip(elements), interval}
}

// candidates returns the elements that may be for some of the packets. mask is applied to
// the field.
func (w *walker) candidates(fields []string, mask []byte, m mapping, p packets) (all []verdict) {
	any := len(m.elements) > 0 && len(m.elements[0].Key) == 0 // the catch-all element *
	rest, sure := p, true                                     // for that
	for i, e := range m.elements {
		if e.End || len(e.Key) == 0 {
			continue
		}
		var is match
		if m.interval {
			is = within(fields, mask, m.elements[i:])
		} else {
			is = w.equals(fields, mask, e.Key, p)
		}
		w.work += len(p)
		if is.truth == no || len(p.in(is.src, is.dst)) == 0 {
			continue
		}
		if e.Limited {
			is.truth = maybe
		}
		if all = append(all, verdict{is, e}); any && is.truth == yes {
			rest = w.cut(rest, is)
		}
		sure = sure && is.truth == yes
	}
	if any && len(rest) > 0 {
		e := m.elements[0]
		src, dst := rest.addresses()
		sure = sure && !e.Limited && len(rest) == 1 && !w.spent()
		all = append(all, verdict{match{src: src, dst: dst, truth: either(sure, yes, maybe)}, e})
	}
	return all
}

// cut returns the packets that do not match, or more if there are too many ranges.
func (w *walker) cut(p packets, m match) packets {
	if w.work += p.size(); w.spent() || len(p) > maxBoxes {
		return p
	}
	return p.without(box{m.src, m.dst})
}

// within returns which packets are in the interval that begins with the first bound.
func within(fields []string, mask []byte, bounds []nfnetlink.MapElement) match {
	from, isAddress := netip.AddrFromSlice(bounds[0].Key)
	if of := fieldOf(fields[0]); isAddress && of != other && len(fields) == 1 && mask == nil {
		r := iprange.Range{From: from, To: iprange.All(from.Is6()).To}
		if next, ok := netip.AddrFromSlice(append([]byte{}, either(len(bounds) > 1, bounds[min(1, len(bounds)-1)].Key, nil)...)); ok {
			r.To = next.Prev()
		}
		return addressMatch(of, r)
	}
	return match{truth: maybe}
}

func fieldOf(name string) field {
	switch name {
	case "ip saddr", "ip6 saddr":
		return source
	case "ip daddr", "ip6 daddr":
		return destination
	}
	return other
}

func addressMatch(of field, r iprange.Range) match {
	if of == source {
		return match{src: []iprange.Range{r}, truth: yes}
	}
	return match{dst: []iprange.Range{r}, truth: yes}
}

// equals returns which packets have a key. Each component of a concatenation is padded to
// four bytes.
func (w *walker) equals(fields []string, mask, key []byte, p packets) match {
	m := match{truth: yes}
	for _, f := range fields {
		size := 4
		if strings.HasPrefix(f, "ip6 ") {
			size = 16
		} else if strings.HasSuffix(f, "ifname") {
			size = unix.IFNAMSIZ
		}
		if len(key) < size && len(fields) > 1 {
			return match{truth: maybe}
		}
		part := key[:min(size, len(key))]
		key = key[len(part):]
		of := fieldOf(f)
		have, single := p.single(of == source)
		a, isAddress := netip.AddrFromSlice(part)
		switch {
		case f == "iifname" || f == "oifname":
			m.truth = min(m.truth, w.facts.named(f, part))
		case of == other || !isAddress || mask != nil && !single:
			m.truth = min(m.truth, maybe)
		case mask != nil:
			m.truth = min(m.truth, truthOf(bytes.Equal(part, masked(have, mask))))
		case of == source:
			m.src = []iprange.Range{{From: a, To: a}}
		default:
			m.dst = []iprange.Range{{From: a, To: a}}
		}
	}
	return m
}

// masked returns the bits of an address that a mask keeps.
func masked(a netip.Addr, mask []byte) []byte {
	key := a.AsSlice()
	for i := range min(len(key), len(mask)) {
		key[i] &= mask[i]
	}
	return key
}

// toAddress returns the addresses to which a rule may translate packets by a map, sorted;
// none and whether there is one for each of them.
func (w *walker) toAddress(p packets, r nfnetlink.Rule, n rule.NAT) (all []netip.Addr, found truth) {
	m, read := w.maps[id{r.Family, r.Table, n.ToMap}]
	if w.steps += len(m.elements) / elementsPerRule; !read {
		return nil, maybe
	}
	candidates := w.candidates([]string{n.ToField}, n.ToMask, m, p)
	limited, rest := false, p
	for _, e := range candidates {
		if value, ok := netip.AddrFromSlice(e.Value); ok {
			all = append(all, value)
		}
		if limited = limited || e.Limited; e.truth == yes {
			rest = w.cut(rest, e.match)
		}
	}
	keys := 1 // that there can be
	for _, b := range n.ToMask {
		for ; b != 0 && keys <= len(m.elements); b &= b - 1 {
			keys *= 2
		}
	}
	switch {
	case len(rest) == 0, n.ToMask != nil && len(candidates) >= keys && !limited:
		found = yes
	case len(candidates) > 0:
		found = maybe
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), found
}
