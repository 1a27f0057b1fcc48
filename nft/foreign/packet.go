package foreign

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A truth is whether a packet satisfies a condition.
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

// holds reports whether the packet satisfies the condition of a statement of a chain.
func (t *Tracer) holds(c *Chain, s rule.Statement) truth {
	p := t.packet
	switch s.Field {
	case "iifname", "oifname":
		if s.Set != "" || s.Mask != nil || s.Op != "==" && s.Op != "!=" {
			return maybe
		}
		return p.named(s.Field, s.Value).is(s.Op == "==")
	case "iif", "oif":
		d, known := p.device(s.Field)
		return number(s, d.Index, either[uint32](known, allBits, 0))
	case "fib saddr type":
		return number(s, uint32(p.SrcType), either[uint32](p.SrcType != unix.RTN_UNSPEC, allBits, 0))
	case "fib daddr type":
		return number(s, uint32(p.DstType), either[uint32](p.DstType != unix.RTN_UNSPEC, allBits, 0))
	case "ct state":
		const isNew = 8 // NF_CT_STATE_BIT(IP_CT_NEW) of nft
		return number(s, isNew, knownCT)
	case "ct status":
		return number(s, either[uint32](p.Src == p.Dst, dstNAT, 0), knownCT)
	case "ip saddr", "ip6 saddr", "ip daddr", "ip6 daddr":
		if strings.HasPrefix(s.Field, "ip6 ") != p.Dst.Is6() {
			return no // nft checks the family first
		}
		if a := p.address(s.Field); s.Set != "" && s.Mask == nil && a.IsValid() {
			in, limited, err := t.conn.HasElement(c.Family, c.Table, s.Set, a)
			if err != nil || limited {
				return maybe
			}
			return truthOf(in).is(s.Op == "==")
		}
	}
	var m match
	switch m.compare(s, nil); {
	case m.other:
		return maybe
	case m.never:
		return no
	case len(m.marks) > 0:
		return p.marked(c, m.marks[0])
	}
	return min(p.within(p.Src, m.src), p.within(p.Dst, m.dst))
}

// within reports whether an address is in a set; nil: any.
func (p Packet) within(a netip.Addr, set []iprange.Range) truth {
	switch {
	case set == nil, a.IsValid() && iprange.Contains(set, a):
		return yes
	case a.IsValid():
		return no
	case covers(set, []iprange.Range{iprange.All(p.Dst.Is6())}):
		return yes
	}
	return maybe
}

// dstNAT is IPS_DST_NAT: the destination was translated. A packet that comes back to its
// source passes the node for no other reason.
const dstNAT = 1 << 5

// knownCT are the bits of connection tracking that are known for a new connection.
const knownCT = 1 | 2 | 4 | 8 | 16 | 32 | 64

// number evaluates a comparison of a number of which some bits are known.
func number(s rule.Statement, value, known uint32) truth {
	if b, ok := bitsOf(s); ok {
		return b.of(value, known)
	}
	return maybe
}

func (b bits) of(value, known uint32) truth {
	switch {
	case (value^b.value)&known&b.mask != 0, b.value&^b.mask != 0:
		return no.is(!b.not)
	case b.mask&^known == 0:
		return yes.is(!b.not)
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

// marked evaluates a comparison of the mark in a chain.
func (p Packet) marked(c *Chain, b bits) truth {
	unset := p.Unset | kubeProxyMark | portmapMark
	if c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy" {
		unset |= b.mask // its bit is configurable
	}
	return b.of(p.mark.value, p.mark.known|unset&^p.mark.changed)
}

// address returns the address that a field names, the zero address if it is unknown
// or another field.
func (p Packet) address(field string) netip.Addr {
	switch field {
	case "ip saddr", "ip6 saddr":
		return p.Src
	case "ip daddr", "ip6 daddr":
		return p.Dst
	}
	return netip.Addr{}
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

// named reports whether an interface has a name or, if that is not zero-terminated,
// one that begins with it.
func (p Packet) named(field string, value []byte) truth {
	d, known := p.device(field)
	if !known {
		return maybe
	}
	name, _, whole := bytes.Cut(value, []byte{0})
	return truthOf(string(name) == d.Name || !whole && strings.HasPrefix(d.Name, string(name)))
}

// elementsPerRule is how many elements of a map take as long to compare as a rule.
const elementsPerRule = 50

// lookup returns the verdicts that a map may have for the packet.
func (t *Tracer) lookup(c *Chain, s rule.Statement) ([]target, truth) {
	field, _, _ := strings.Cut(s.String(), " vmap @")
	m, ok := t.maps[id{c.Family, c.Table, s.Expr.Str(unix.NFTA_LOOKUP_SET)}]
	if !ok {
		return t.anyTarget(c), maybe
	}
	t.rules += len(m.elements) / elementsPerRule
	var found []target
	elements, truth := t.packet.candidates(strings.Split(field, " . "), nil, m)
	seen := map[target]bool{}
	for _, e := range elements {
		var to target
		if to.code, to.chain = e.Verdict(); !seen[to] {
			seen[to] = true
			found = append(found, to)
		}
	}
	return found, truth
}

// anyTarget returns the verdicts that an unread map may have: any, and a jump to any
// chain of the table that is not a base chain.
func (t *Tracer) anyTarget(c *Chain) []target {
	found := []target{{code: unix.NFT_RETURN}, {code: accept}}
	for _, to := range t.Chains {
		if to.Hook == nil && to.Family == c.Family && to.Table == c.Table {
			found = append(found, target{unix.NFT_JUMP, to.Name})
		}
	}
	return found
}

// A mapping is the content of a map. In one of intervals, an element is the first key
// of an interval, and End marks the key after the last.
type mapping struct {
	elements []nfnetlink.Element // sorted by key
	interval bool
}

func newMapping(elements []nfnetlink.Element, interval bool) mapping {
	slices.SortFunc(elements, func(a, b nfnetlink.Element) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.End == b.End {
			return c
		}
		return either(a.End, -1, 1)
	})
	return mapping{slices.Clip(elements), interval}
}

// candidates returns the elements that may be the packet's, and whether there is one.
// mask is applied to the field.
func (p Packet) candidates(fields []string, mask []byte, m mapping) (all []nfnetlink.Element, found truth) {
	for i, e := range m.elements {
		var is truth
		switch {
		case e.End || len(e.Key) == 0:
			continue
		case m.interval:
			is = p.between(fields, mask, m.elements[i:])
		default:
			is = p.meets(fields, mask, e.Key)
		}
		if is == yes && e.Limited {
			is = maybe
		}
		if found = max(found, is); is != no {
			all = append(all, e)
		}
	}
	if len(m.elements) > 0 && len(m.elements[0].Key) == 0 && found != yes { // the catch-all element *
		all, found = append(all, m.elements[0]), yes
		if m.elements[0].Limited {
			found = maybe
		}
	}
	return all, found
}

// between reports whether the field is in the interval that begins with the first
// bound.
func (p Packet) between(fields []string, mask []byte, bounds []nfnetlink.Element) truth {
	key := p.key(fields[0], mask)
	switch {
	case key == nil || len(fields) > 1:
		return maybe
	case bytes.Compare(key, bounds[0].Key) < 0:
		return no
	}
	return truthOf(len(bounds) == 1 || bytes.Compare(key, bounds[1].Key) < 0)
}

// key returns an address of the packet, masked; nil if it is unknown.
func (p Packet) key(field string, mask []byte) []byte {
	key := p.address(field).AsSlice()
	for i := range min(len(key), len(mask)) {
		key[i] &= mask[i]
	}
	return key
}

// meets reports whether the packet matches a key. Each component of a
// concatenation is padded to four bytes.
func (p Packet) meets(fields []string, mask, key []byte) truth {
	result := yes
	for _, f := range fields {
		size := 4
		if strings.HasPrefix(f, "ip6 ") {
			size = 16
		} else if strings.HasSuffix(f, "ifname") {
			size = unix.IFNAMSIZ
		}
		if len(key) < size && len(fields) > 1 {
			return maybe
		}
		part := key[:min(size, len(key))]
		key = key[len(part):]
		switch have := p.key(f, mask); {
		case have != nil:
			result = min(result, truthOf(bytes.Equal(part, have)))
		case f == "iifname" || f == "oifname":
			result = min(result, p.named(f, part))
		default:
			result = min(result, maybe)
		}
	}
	return result
}
