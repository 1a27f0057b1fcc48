package foreign

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/rule"
)

// A Packet is the first packet of a new connection. It comes without the bits of the
// mark that are Unset, and without the marks of kube-proxy and portmap. Other marks
// are unknown, until a rule sets them.
type Packet struct {
	Src, Dst         netip.Addr       // Src is the zero address if unknown
	From             []iprange.Range  // what an unknown Src is among; nil: any
	SrcType, DstType int              // route types, such as unix.RTN_LOCAL; unix.RTN_UNSPEC if unknown
	FromNode         bool             // sent by the node itself, so that it has no In
	In, Out          routes.Interface // the zero value if unknown
	Unset            uint32

	// any means that it may belong to any connection that needs masquerading: not one
	// to an address of this node or out of the loopback device.
	any bool
	// marked means that it may have kube-proxy's and portmap's marks.
	marked bool
	// ofPod means that a pod sends it.
	ofPod bool
	// origin is the interfaces on which it may have been received, nil: any.
	origin judge.Names
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

// plain reports whether a statement compares all of a field with one value.
func plain(s rule.Statement) bool {
	return s.Set == "" && s.Mask == nil && (s.Op == "==" || s.Op == "!=")
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

// marked evaluates a comparison of the mark in a chain. kube-proxy and portmap compare nothing
// but their bit: whatever else is compared with may be the mark of another program, such as
// 51820 (wg-quick), which has both bits.
func (w *walker) marked(c *Chain, b bits) truth {
	unset := w.facts.Unset
	if oneBit := b.mask&(b.mask-1) == 0; oneBit && !w.facts.marked {
		// kube-proxy's bit is configurable, the names of its chains are not.
		kubeProxy := c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy"
		if b.mask == kubeProxyMark || b.mask == portmapMark || kubeProxy {
			unset |= b.mask
		}
	} else if b.mask == allBits && strings.HasPrefix(c.Table, "flannel-") && !w.facts.marked {
		unset |= kubeProxyMark // flannel leaves kube-proxy's packets alone
	}
	if c.Name == "ts-postrouting" && (w.facts.ofPod || !w.facts.any) { // tailscale marks what its network sends
		return b.of(w.mark.value, w.mark.known|b.mask)
	}
	return b.of(w.mark.value, w.mark.known|unset&^w.mark.changed)
}

// device returns the interface that a field is about, and whether it is known. A
// packet sent by the node was received on one without a name.
func (p Packet) device(field string) (d routes.Interface, known bool) {
	switch {
	case strings.HasPrefix(field, "oif"):
		return p.Out, p.Out.Name != ""
	case p.FromNode:
		return routes.Interface{}, true
	}
	return p.In, p.In.Name != ""
}

// onDevice evaluates a comparison of an interface.
func (p Packet) onDevice(s rule.Statement) truth {
	d, known := p.device(s.Field)
	switch {
	case !plain(s):
		return maybe
	case strings.HasPrefix(s.Field, "oif") && p.any && lastWord(s) == `"lo"`:
		return no.is(s.Op == "==")
	case !strings.HasSuffix(s.Field, "name"):
		return number(s, d.Index, either[uint32](known, allBits, 0))
	}
	return p.named(s.Field, s.Value).is(s.Op == "==")
}

// named reports whether an interface has a name or, if that is not zero-terminated,
// one that begins with it.
func (p Packet) named(field string, value []byte) truth {
	d, known := p.device(field)
	name, _, whole := bytes.Cut(value, []byte{0})
	if field == "iifname" && p.origin != nil {
		is := judge.Names{{Name: string(name) + either(whole, "", "*"), In: true}}
		return either(len(p.origin.And(is)) == 0, no, either(len(p.origin.Minus(is)) == 0, yes, maybe))
	}
	if !known {
		return maybe
	}
	return truthOf(string(name) == d.Name || !whole && strings.HasPrefix(d.Name, string(name)))
}

// ofType evaluates a comparison of the type of an address.
func (p Packet) ofType(s rule.Statement, typ int) truth {
	if b, _ := bitsOf(s); p.any && strings.HasPrefix(s.Field, "fib daddr") && b.value == unix.RTN_LOCAL {
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
		}
		if s.Expr.Name == "dynset" {
			added = s.Expr.Str(unix.NFTA_DYNSET_SET_NAME)
		}
		if a.take(s) {
			continue
		}
		switch itself := w.facts.Src == w.facts.Dst; {
		case !pairs(s) || added == "" || s.Set != added || s.Op != "==" || !itself && !c.Own:
			w.compare(c, s, p, &m)
		default: // the rule adds the source as both; into our set, nobody adds other pairs
			m.add(s, either(itself, yes, no), other)
		}
		if m.truth == no {
			return m, a
		}
	}
	if a.NAT.Family != 0 && r.Family == nfnetlink.Inet {
		w.restrict(&m, rule.Statement{Field: "nat", Op: "=="}, p, anywhere(a.NAT.Family), destination)
	}
	return m, a
}

// pairs reports whether a statement looks up the source and the destination.
func pairs(s rule.Statement) bool {
	return s.Field == "ip saddr . ip daddr" || s.Field == "ip6 saddr . ip6 daddr"
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
		family, known := map[string]nfnetlink.Family{
			"ipv4": nfnetlink.IPv4, "ip": nfnetlink.IPv4, "ipv6": nfnetlink.IPv6, "ip6": nfnetlink.IPv6,
		}[lastWord(s)]
		switch {
		case !plain(s):
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
	var a netip.Addr
	single := false
	if w.conn != nil {
		a, single = p.single(strings.HasSuffix(s.Field, "saddr"))
	}
	if !single {
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
	open := w.conn == nil || addresses == nil
	if !open {
		src, dst := p.addresses()
		open = !covers(set, either(of == source, src, dst))
	}
	if addresses == nil {
		m.truth = maybe
	}
	if of == source || open {
		m.conditions = append(m.conditions, newCondition(s, of, open))
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
