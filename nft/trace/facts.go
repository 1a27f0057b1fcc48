package trace

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/rule"
)

// A Packet is the first packet of a connection. Its addresses are known.
type Packet struct {
	Src, Dst netip.Addr
	// SrcType and DstType are route types, such as unix.RTN_LOCAL; unix.RTN_UNSPEC if unknown.
	SrcType, DstType int
	FromNode         bool // sent by the node itself, so that it has no In
	// In and Out are the interfaces, the zero value if unknown. A name with a trailing "*" stands
	// for any that begins so.
	In, Out  routes.Interface
	Protocol uint8  // IPPROTO_…, 0 if unknown
	Port     uint16 // of the destination, 0 if unknown
	// Unset are bits of the mark that it comes without. The others are unknown, until a rule sets
	// them.
	Unset uint32
	// Translated is whether its destination was translated before. If it certainly was, the packet
	// may have the marks of kube-proxy and the CNI plugin portmap.
	Translated Truth
	// Known means that the connection exists: its state may be any.
	Known bool
}

// Delivered reports whether the packet is for this node itself.
func (p Packet) Delivered() bool {
	switch p.DstType {
	case unix.RTN_LOCAL, unix.RTN_ANYCAST:
		return true
	}
	return p.DstType == unix.RTN_BROADCAST && !p.FromNode
}

// Bits of the packet mark with which these programs mark what they will masquerade:
// kube-proxy's default, and that of the CNI plugin portmap.
const (
	kubeProxyMark = 0x4000
	portmapMark   = 0x2000
)

// A Truth is how certain it is that something is so.
type Truth int

// The truths, from the least certain.
const (
	No Truth = iota
	Maybe
	Yes
)

func truthOf(b bool) Truth {
	if b {
		return Yes
	}
	return No
}

// unless returns the truth of the opposite, if that is asked for.
func (t Truth) unless(not bool) Truth {
	if not {
		return Yes - t
	}
	return t
}

// A fact is what is known of a field of the packet: the bits that are known, and their value.
type fact struct {
	value, known [16]byte
	size         int    // in bytes, 0 if unknown
	values       uint32 // of a number: how many it can be, from first on; 0: that follows from the bits
	first        uint32
}

func factOf(b []byte) (f fact) {
	f.size = copy(f.value[:], b)
	for i := range f.size {
		f.known[i] = 0xff
	}
	return f
}

func number(n, known uint32) (f fact) {
	f.size = 4
	binary.NativeEndian.PutUint32(f.value[:], n)
	binary.NativeEndian.PutUint32(f.known[:], known)
	return f
}

// masked returns what is known of a part of the field; the other bits are zero.
func (f fact) masked(mask []byte) fact {
	for i := range min(len(mask), len(f.value)) {
		f.value[i] &= mask[i]
		f.known[i] |= ^mask[i]
		f.values = 0
	}
	return f
}

// whole returns how many bytes are known from the beginning.
func (f fact) whole() int {
	n := slices.IndexFunc(f.known[:f.size], func(b byte) bool { return b != 0xff })
	if n < 0 {
		return f.size
	}
	return n
}

// count returns how many values the field can have, 0: many.
func (f fact) count() uint32 {
	unknown := 0
	for _, b := range f.known[:f.size] {
		unknown += 8 - bits.OnesCount8(b)
	}
	switch {
	case f.values > 0:
		return f.values
	case f.size == 0 || unknown > 16:
		return 0
	}
	return 1 << unknown
}

// within reports whether the field, or as much of it, is between two values.
func (f fact) within(from, to []byte) Truth {
	if len(from) != len(to) || len(from) > len(f.value) {
		return Maybe
	}
	fromLow, fromHigh, toLow, toHigh, differs := 0, 0, 0, 0, false
	order := func(have *int, a, b byte) {
		switch {
		case *have != 0 || a == b:
		case a < b:
			*have = -1
		default:
			*have = 1
		}
	}
	for i := range from {
		low, high := f.value[i]&f.known[i], f.value[i]|^f.known[i]
		order(&fromLow, low, from[i])
		order(&fromHigh, high, from[i])
		order(&toLow, low, to[i])
		order(&toHigh, high, to[i])
		differs = differs || from[i] == to[i] && (low^from[i])&f.known[i] != 0
	}
	single := string(from) == string(to)
	switch {
	case f.values > 0 && single && binary.NativeEndian.Uint32(from)-f.first >= f.values:
		return No
	case fromHigh < 0, toLow > 0, single && differs:
		return No
	case fromLow >= 0 && toHigh <= 0:
		return Yes
	}
	return Maybe
}

// The fields that can be known, and their sizes. The value of those that are ordered is in
// network order.
var (
	sizes = map[string]int{
		"ip saddr": 4, "ip daddr": 4, "ip6 saddr": 16, "ip6 daddr": 16, "iifname": unix.IFNAMSIZ, "oifname": unix.IFNAMSIZ,
		"iif": 4, "oif": 4, "meta nfproto": 1, "meta protocol": 2, "meta l4proto": 1, "ip protocol": 1, "th sport": 2,
		"th dport": 2, "fib saddr type": 4, "fib daddr type": 4, "ct state": 4, "ct status": 4, "ct mark": 4, metaMark: 4,
	}
	ordered = []string{"ip saddr", "ip daddr", "ip6 saddr", "ip6 daddr", "th sport", "th dport"}
)

const metaMark = "meta mark"

// The states and the status of a connection: NF_CT_STATE_BIT(IP_CT_NEW) of nft, untracked, and
// IPS_DST_NAT.
const (
	stateNew       = 8
	stateUntracked = 64
	dstNAT         = 1 << 5
)

// learn notes what is known of the packet at a hook.
func (t *Tracer) learn() {
	p := t.packet
	ipv6 := p.Dst.Is6()
	words, family, ether := "ip ", uint8(unix.NFPROTO_IPV4), uint16(unix.ETH_P_IP)
	if ipv6 {
		words, family, ether = "ip6 ", unix.NFPROTO_IPV6, unix.ETH_P_IPV6
	}
	f := map[string]fact{
		words + "daddr": factOf(p.Dst.AsSlice()), "meta nfproto": factOf([]byte{family}),
		"meta protocol": factOf(binary.BigEndian.AppendUint16(nil, ether)),
	}
	if p.Src.IsValid() {
		f[words+"saddr"] = factOf(p.Src.AsSlice())
	}
	for name, typ := range map[string]int{"fib saddr type": p.SrcType, "fib daddr type": p.DstType} {
		if typ != unix.RTN_UNSPEC {
			f[name] = number(uint32(typ), allBits)
		}
	}
	device(f, "iif", p.In, p.FromNode)
	device(f, "oif", p.Out, false)
	if p.Protocol != 0 {
		f["meta l4proto"], f["ip protocol"] = factOf([]byte{p.Protocol}), factOf([]byte{p.Protocol})
	}
	if p.Port != 0 {
		f["th dport"] = factOf(binary.BigEndian.AppendUint16(nil, p.Port))
	}
	status, known := uint32(0), uint32(0x7f)
	switch {
	case p.Src == p.Dst || p.Translated == Yes: // a packet comes back to its source for no other reason
		status = dstNAT
	case p.Translated == Maybe:
		known &^= dstNAT
	}
	switch {
	case p.Known:
		f["ct status"] = number(status, dstNAT&known)
	case t.untracked == Yes:
		f["ct state"] = number(stateUntracked, allBits)
	default:
		f["ct status"] = number(status, known)
		if t.untracked == No {
			f["ct state"] = number(stateNew, allBits)
		}
	}
	t.facts = f
}

// device notes an interface. A packet that the node sends was received on none.
func device(f map[string]fact, field string, d routes.Interface, none bool) {
	if d.Index != 0 || none {
		f[field] = number(d.Index, allBits)
	}
	prefix, more := strings.CutSuffix(d.Name, "*")
	name := fact{size: unix.IFNAMSIZ}
	copy(name.value[:], prefix)
	for i := range name.known {
		if i < len(prefix) || !more {
			name.known[i] = 0xff
		}
	}
	if d.Name != "" || none {
		f[field+"name"] = name
	}
}

// fact returns what is known of a field in a chain.
func (t *Tracer) fact(c *Chain, of rule.Part) fact {
	if of.Modulus > 0 {
		f := number(0, allBits<<bits.Len32(of.Offset|(of.Offset+of.Modulus-1)))
		f.values, f.first = of.Modulus, of.Offset
		return f.masked(of.Mask)
	}
	f, ok := t.facts[of.Field]
	switch {
	case of.Field == metaMark:
		f = t.marked(c, of.Mask)
	case !ok:
		f = fact{size: sizes[of.Field]}
	}
	return f.masked(of.Mask)
}

// holds reports whether the packet satisfies a comparison.
func (t *Tracer) holds(c *Chain, s rule.Statement) Truth {
	is := t.compare(c, s)
	if s.Field == "ct status" || s.Field == "ct mark" { // which break the rule off if there is no connection
		is = min(is, Yes-t.untracked)
	}
	return is
}

func (t *Tracer) compare(c *Chain, s rule.Statement) Truth {
	if s.Set != "" {
		return t.isIn(c, s).unless(s.Op == "!=")
	}
	if t.onLoopback(s) {
		return No.unless(s.Op == "!=")
	}
	f := t.fact(c, rule.Part{Field: s.Field, Mask: s.Mask})
	low, high := make([]byte, len(s.Value)), []byte(strings.Repeat("\xff", len(s.Value)))
	order := slices.Contains(ordered, s.Field)
	switch {
	case len(s.Value) == 0:
	case s.Last != nil:
		return f.within(s.Value, s.Last).unless(s.Op == "!=")
	case s.Op == "==" || s.Op == "!=":
		return f.within(s.Value, s.Value).unless(s.Op == "!=")
	case order && (s.Op == ">=" || s.Op == "<"):
		return f.within(s.Value, high).unless(s.Op == "<")
	case order:
		return f.within(low, s.Value).unless(s.Op == ">")
	}
	return Maybe
}

// onLoopback reports whether a statement compares the interface that the packet leaves by with
// the loopback interface, by which no packet leaves for another host, while that is all that is
// known of it.
func (t *Tracer) onLoopback(s rule.Statement) bool {
	lo := map[string]string{"oifname": "lo\x00", "oif": string(binary.NativeEndian.AppendUint32(nil, 1))}[s.Field]
	return t.packet.Out == (routes.Interface{}) && t.packet.DstType == unix.RTN_UNICAST && lo != "" &&
		(s.Op == "==" || s.Op == "!=") && s.Mask == nil && s.Last == nil && strings.HasPrefix(string(s.Value), lo)
}

// isIn reports whether a set has the packet. Ours of pairs have each source with itself alone.
func (t *Tracer) isIn(c *Chain, s rule.Statement) Truth {
	if c.Own && (s.Field == "ip saddr . ip daddr" || s.Field == "ip6 saddr . ip6 daddr") {
		return truthOf(t.packet.Src == t.packet.Dst)
	}
	at, key := id{c.Family, c.Table, s.Set}, t.key(c, s.Key)
	if of := t.sets[at]; of != nil {
		_, has := of.lookup(key)
		return has
	}
	if t.Has == nil || !t.large[at] || len(key) != 1 || key[0].whole() != key[0].size {
		return Maybe
	}
	a, ok := netip.AddrFromSlice(key[0].value[:key[0].size])
	if !ok {
		return Maybe
	}
	has, limited, err := t.Has(c.Family, c.Table, s.Set, a)
	if err != nil || limited {
		return Maybe
	}
	return truthOf(has)
}

func (t *Tracer) key(c *Chain, parts []rule.Part) (key []fact) {
	for _, p := range parts {
		key = append(key, t.fact(c, p))
	}
	return key
}

const allBits = 0xffffffff

// A Mark is what is known of a packet's mark: the bits that are known, and their value.
type Mark struct {
	Value, Known uint32
	changed      uint32 // the bits that a rule may have changed
}

// Open returns the bits that are not certain because of a rule.
func (m Mark) Open() uint32 { return m.changed &^ m.Known }

// set returns the mark after a rule that sets it, or may do so.
func (m Mark) set(to rule.NewMark, sure bool) Mark {
	known := (^to.Keep | m.Known) &^ to.Unknown
	value := (m.Value&to.Keep ^ to.Xor) & known
	changed := m.changed | ^to.Keep&^known | to.Xor | to.Unknown | value&^m.Value
	if !sure {
		known &= m.Known &^ (value ^ m.Value)
	}
	return Mark{value & known, known, changed}
}

// marked returns what is known of the mark where a chain compares some of its bits. Only a
// comparison of exactly the bit of kube-proxy or portmap is about their marks.
func (t *Tracer) marked(c *Chain, mask []byte) fact {
	compared, unset := uint32(allBits), uint32(0)
	if len(mask) == 4 {
		compared = binary.NativeEndian.Uint32(mask)
	}
	switch kubeProxy := c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy"; {
	case compared&^t.packet.Unset == 0:
		unset = compared
	case t.packet.Translated == Yes:
	case strings.HasPrefix(c.Table, "flannel-") && compared == allBits: // it leaves kube-proxy's packets alone
		unset = kubeProxyMark
	case compared == kubeProxyMark, compared == portmapMark,
		kubeProxy && bits.OnesCount32(compared) == 1, // its bit is configurable, these names are not
		// tailscale marks what its network sends
		c.Name == "ts-postrouting" && (t.packet.In.Name != "" || t.packet.FromNode || t.packet.SrcType != unix.RTN_UNSPEC):
		unset = compared
	}
	return number(t.mark.Value, t.mark.Known|unset&^t.mark.changed)
}

// families reports whether a chain or an expression of a family meets the packet.
func (t *Tracer) ofFamily(f nfnetlink.Family) bool {
	return f == 0 || f == nfnetlink.Inet || (f == nfnetlink.IPv6) == t.packet.Dst.Is6()
}
