package trace

import (
	"bytes"
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
	// Bridged means that a bridge passes it on, and asks these rules (bridge-nf-call-iptables): it has
	// no In at postrouting (br_nf_post_routing).
	Bridged bool
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
	redirected bool // its destination was translated by rules that were followed, which set its mark
	mark       Mark // that they set
	// Masqueraded is the source that masquerading gives it, the zero address if unknown.
	Masqueraded netip.Addr
	natted      Truth // whether its source was translated, by a chain before
	// Known means that the connection exists: its state may be any.
	Known bool
}

// Delivered reports whether the packet is for this node itself.
func (p Packet) Delivered() bool {
	return p.DstType == unix.RTN_LOCAL || p.DstType == unix.RTN_ANYCAST || p.DstType == unix.RTN_BROADCAST && !p.FromNode
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

// A fact is what is known of a field of the packet: the bits that are known, and their value.
type fact struct {
	value, known [16]byte
	size         int    // in bytes, 0 if unknown
	values       uint32 // of a number: how many it can be, from first on; 0: that follows from the bits
	first        uint32
}

// exactly returns what is known of a field of a size if it has a value of the same size.
func exactly(value []byte, size int) fact {
	f := fact{size: size}
	if len(value) == size {
		copy(f.value[:], value)
		for i := range value {
			f.known[i] = 0xff
		}
	}
	return f
}

// ordered returns a number in network order; 0 is not known.
func ordered(n uint32, size int) fact {
	if n == 0 {
		return fact{size: size}
	}
	return exactly(binary.BigEndian.AppendUint32(nil, n)[4-size:], size)
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

// whole reports whether all of the field is known.
func (f fact) whole() bool {
	return f.size > 0 && !slices.ContainsFunc(f.known[:f.size], func(b byte) bool { return b != 0xff })
}

// within reports whether the field, or as much of it, is between two values; without the second, whether
// it is the first.
func (f fact) within(from, to []byte) Truth {
	n := len(from)
	if to == nil {
		to = from
	}
	if n == 0 || n > len(f.value) {
		return Maybe
	}
	low, high, single, differs := f.value, f.value, string(from) == string(to), false
	for i := range n {
		low[i] &= f.known[i]
		high[i] |= ^f.known[i]
		differs = differs || (f.value[i]^from[i])&f.known[i] != 0
	}
	if f.values > 0 && n == 4 {
		differs = binary.NativeEndian.Uint32(from)-f.first >= f.values
	}
	switch {
	case single && differs, bytes.Compare(high[:n], from) < 0, bytes.Compare(low[:n], to) > 0:
		return No
	case bytes.Compare(low[:n], from) >= 0 && bytes.Compare(high[:n], to) <= 0:
		return Yes
	}
	return Maybe
}

// The states and the status of a connection: NF_CT_STATE_BIT(IP_CT_NEW) of nft, untracked, and
// IPS_DST_NAT.
const (
	stateInvalid   = 1
	stateNew       = 8
	stateUntracked = 64
	srcNAT         = 1 << 4
	dstNAT         = 1 << 5
)

// fact returns what is known of a field in a chain.
func (t *Tracer) fact(c *Chain, of rule.Part) fact {
	p, f := t.packet, fact{size: 4} // of most fields
	switch field := of.Field; field {
	case "meta mark":
		f = t.marked(c, of.Mask)
	case "ip saddr", "ip6 saddr", "ip daddr", "ip6 daddr":
		a, size := p.Src, 4
		if isDestination(field) {
			a = p.Dst
		}
		if strings.HasPrefix(field, "ip6") {
			size = 16
		}
		f = exactly(a.AsSlice(), size)
	case "iifname":
		f = named(p.In, p.FromNode || p.Bridged)
	case "oifname":
		f = named(p.Out, false)
	case "ct state":
		switch before := t.beforeTracking(); {
		case before == Maybe, t.Untracked == Maybe:
		case t.Untracked == Yes:
			f = number(stateUntracked, allBits)
		case before == Yes:
			f = number(stateInvalid, allBits)
		case !p.Known:
			f = number(stateNew, allBits)
		}
	case "ct status":
		if t.Untracked == No && t.beforeTracking() != Maybe {
			f = p.status()
		}
	default:
		f = p.number(field)
	}
	if of.Modulus > 0 {
		f = fact{size: 4, values: of.Modulus, first: of.Offset}
	}
	return f.masked(of.Mask)
}

// status returns what is known of the status of the connection. A packet comes back to its source
// only if it was translated.
func (p Packet) status() fact {
	value, known := uint32(0), uint32(0x7f)
	if p.Src == p.Dst && p.natted == No || p.Translated == Yes || p.redirected {
		value = dstNAT
	} else if p.Translated == Maybe {
		known &^= dstNAT
	}
	switch p.natted {
	case Maybe:
		known &^= srcNAT
	case Yes:
		value |= srcNAT
	}
	if p.Known {
		known &= dstNAT
	}
	return number(value, known)
}

// named returns what is known of the name of an interface.
func named(d routes.Interface, none bool) fact {
	prefix, more := strings.CutSuffix(d.Name, "*")
	name := fact{size: unix.IFNAMSIZ}
	copy(name.value[:], prefix)
	for i := range name.known {
		if i < len(prefix) || !more && (d.Name != "" || none) {
			name.known[i] = 0xff
		}
	}
	return name
}

// number returns what is known of a field that is a number. None of them is 0.
func (p Packet) number(field string) fact {
	n := uint32(0)
	switch field {
	case "meta nfproto":
		return ordered(p.of(unix.NFPROTO_IPV4, unix.NFPROTO_IPV6), 1)
	case "meta protocol":
		return ordered(p.of(unix.ETH_P_IP, unix.ETH_P_IPV6), 2)
	case "meta l4proto", "ip protocol":
		return ordered(uint32(p.Protocol), 1)
	case "th sport":
		return fact{size: 2}
	case "th dport":
		return ordered(uint32(p.Port), 2)
	case "fib saddr type":
		n = uint32(p.SrcType)
	case "fib daddr type":
		n = uint32(p.DstType)
	case "iif":
		if n = p.In.Index; n == 0 && (p.FromNode || p.Bridged) { // it was received on none
			return number(0, allBits)
		}
	case "oif":
		n = p.Out.Index
	case "ct mark":
	default:
		return fact{}
	}
	if n == 0 {
		return fact{size: 4}
	}
	return number(n, allBits)
}

// of returns the number of the packet's family.
func (p Packet) of(ipv4, ipv6 uint32) uint32 {
	if p.Dst.Is6() {
		return ipv6
	}
	return ipv4
}

// holds reports whether the packet satisfies a comparison. One to another host does not leave by the
// loopback interface.
func (t *Tracer) holds(c *Chain, s rule.Statement) Truth {
	is := No
	switch without := t.Untracked == Yes || t.beforeTracking() == Yes; {
	case without && (s.Field == "ct status" || s.Field == "ct mark"):
		return No // without a connection the kernel breaks the rule off
	case strings.HasPrefix(s.Field, "oif") && t.packet.Out.Name == "" &&
		t.packet.DstType == unix.RTN_UNICAST && strings.HasSuffix(s.String(), ` "lo"`):
	case s.Set != "":
		is = t.isIn(c, s)
	default:
		is = t.fact(c, rule.Part{Field: s.Field, Mask: s.Mask}).within(s.Value, s.Last)
	}
	if s.Op == "!=" {
		return Yes - is
	}
	return is
}

// isIn reports whether a set has the packet. Ours of pairs have each source with itself alone.
func (t *Tracer) isIn(c *Chain, s rule.Statement) Truth {
	if c.Own && len(s.Key) == 2 && ofDestination(s.Key[1]) {
		return truthOf(t.packet.Src == t.packet.Dst)
	}
	_, has := t.lookup(c, s.Set, s.Key)
	if of := t.sets[idOf(c.Chain, s.Set)]; t.Has == nil || of == nil || !of.large {
		return has
	}
	of := t.fact(c, s.Key[0])
	if a, ok := netip.AddrFromSlice(of.value[:of.size]); ok && of.whole() {
		if is, limited, err := t.Has(c.Family, c.Table, s.Set, a); err == nil && !limited {
			return truthOf(is)
		}
	}
	return Maybe
}

// lookup returns the elements of a set or map that the packet may have, and whether it has one. Of
// one that was not read, it may have any: then there are none.
func (t *Tracer) lookup(c *Chain, name string, parts []rule.Part) ([]element, Truth) {
	of := t.sets[idOf(c.Chain, name)]
	if of == nil || !of.read {
		return nil, Maybe
	}
	var key []fact
	for _, p := range parts {
		key = append(key, t.fact(c, p))
	}
	return of.lookup(key)
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

// without returns the mark if rules may have changed some of its bits, or not.
func (m Mark) without(bits uint32) Mark {
	return Mark{m.Value &^ bits, m.Known &^ bits, m.changed | bits}
}

// marked returns what is known of the mark where a chain compares some of its bits. Only a
// comparison of exactly the bit of kube-proxy or portmap is about their marks.
func (t *Tracer) marked(c *Chain, mask []byte) fact {
	compared, unset := uint32(allBits), t.packet.Unset
	if len(mask) == 4 {
		compared = binary.NativeEndian.Uint32(mask)
	}
	switch kubeProxy := c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy"; {
	case t.packet.Translated == Yes:
	case strings.HasPrefix(c.Table, "flannel-") && compared == allBits: // it leaves kube-proxy's packets alone
		unset |= kubeProxyMark
	case compared == kubeProxyMark, compared == portmapMark,
		kubeProxy && bits.OnesCount32(compared) == 1, // its bit is configurable, these names are not
		// tailscale marks what its network sends
		c.Name == "ts-postrouting" && (t.packet.In.Name != "" || t.packet.FromNode || t.packet.SrcType != unix.RTN_UNSPEC):
		unset |= compared
	}
	m := t.Mark.without(t.others)
	return number(m.Value, m.Known|unset&^m.changed)
}

// families reports whether a chain or an expression of a family meets the packet.
func (t *Tracer) ofFamily(f nfnetlink.Family) bool {
	return f == 0 || f == nfnetlink.Inet || (f == nfnetlink.IPv6) == t.packet.Dst.Is6()
}
