package foreign

import (
	"bytes"
	"encoding/binary"
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

// holds reports whether the packet satisfies the condition of a statement.
func (p Packet) holds(c *Chain, s rule.Statement, r nfnetlink.Rule, member func(nfnetlink.Family, string, string, netip.Addr) (has, limited bool, err error)) truth {
	positive := s.Op != "!="
	switch s.Field {
	case "ip saddr", "ip6 saddr":
		return p.address(p.Src, s, r, member)
	case "ip daddr", "ip6 daddr":
		return p.address(p.Dst, s, r, member)
	case "meta nfproto", "meta protocol":
		if s.Op != "==" && s.Op != "!=" || s.Set != "" || s.Mask != nil {
			return maybe
		}
		word := lastWord(s)
		ipv6 := word == "ipv6" || word == "ip6"
		return truthOf(ipv6 == p.Dst.Is6() && (ipv6 || word == "ipv4" || word == "ip")).is(positive)
	case "iifname", "oifname", "iif", "oif":
		return p.device(s)
	case "fib saddr type", "fib daddr type":
		kind := p.SrcType
		if s.Field == "fib daddr type" {
			kind = p.DstType
		}
		if kind == unix.RTN_UNSPEC || len(s.Value) != 4 || s.Set != "" || s.Op != "==" && s.Op != "!=" {
			return maybe
		}
		return truthOf(binary.NativeEndian.Uint32(s.Value) == uint32(kind)).is(positive)
	case "meta mark":
		return p.marked(c, s)
	case "ct state":
		const isNew = 8 // NF_CT_STATE_BIT(IP_CT_NEW) of nft
		return bits(s, isNew)
	case "ct status":
		return bits(s, 0)
	}
	return maybe
}

// bits evaluates a comparison of masked bits, such as "ct state new".
func bits(s rule.Statement, value uint32) truth {
	if s.Set != "" || len(s.Value) != 4 || len(s.Mask) != 4 || s.Op != "!=" && s.Op != "==" {
		return maybe
	}
	const known = 1 | 2 | 4 | 8 | 16 | 32 | 64
	mask := binary.NativeEndian.Uint32(s.Mask)
	if mask&^known != 0 {
		return maybe
	}
	return truthOf(value&mask == binary.NativeEndian.Uint32(s.Value)).is(s.Op == "==")
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

// marked evaluates a comparison of the mark.
func (p Packet) marked(c *Chain, s rule.Statement) truth {
	var m match
	m.compareMark(s, s.Op != "!=")
	if len(m.marks) != 1 || s.Op != "==" && s.Op != "!=" {
		return maybe
	}
	set, unset := m.marks[0], p.Unset|kubeProxyMark|portmapMark
	if c.Name == "KUBE-POSTROUTING" || c.Table == "kube-proxy" {
		unset |= set.mask // its bit is configurable
	}
	known := p.mark.known | unset&^p.mark.changed
	switch {
	case (p.mark.value^set.value)&known&set.mask != 0:
		return no.is(!set.not)
	case set.mask&^known == 0:
		return yes.is(!set.not)
	}
	return maybe
}

// address evaluates a comparison of an address.
func (p Packet) address(a netip.Addr, s rule.Statement, r nfnetlink.Rule, member func(nfnetlink.Family, string, string, netip.Addr) (has, limited bool, err error)) truth {
	if strings.HasPrefix(s.Field, "ip6 ") != p.Dst.Is6() {
		return no // nft checks the family first
	}
	if s.Set != "" && s.Mask == nil && a.IsValid() && (s.Op == "==" || s.Op == "!=") {
		in, limited, err := member(r.Family, r.Table, s.Set, a)
		if err != nil || limited {
			return maybe
		}
		return truthOf(in).is(s.Op == "==")
	}
	want, ok := s.Range()
	if !ok {
		return maybe
	}
	if !a.IsValid() {
		if everything := iprange.Of(netip.PrefixFrom(want.From, 0)); want == everything {
			return truthOf(s.Op != "!=")
		}
		return maybe
	}
	return truthOf(!a.Less(want.From) && !want.To.Less(a)).is(s.Op != "!=")
}

// device evaluates a comparison of an interface. For packets sent by the node,
// the name of the input interface is empty.
func (p Packet) device(s rule.Statement) truth {
	d := p.Out
	if strings.HasPrefix(s.Field, "iif") {
		if d = p.In; p.FromNode {
			d = Device{}
		}
	}
	if s.Set != "" || s.Mask != nil || s.Op != "==" && s.Op != "!=" || d.Name == "" && (s.Field[:1] != "i" || !p.FromNode) {
		return maybe
	}
	if s.Field == "iif" || s.Field == "oif" {
		if len(s.Value) != 4 {
			return maybe
		}
		return truthOf(binary.NativeEndian.Uint32(s.Value) == d.Index).is(s.Op == "==")
	}
	return truthOf(isName(s.Value, d.Name)).is(s.Op == "==")
}

// isName reports whether a name equals a value or, if the value is not
// zero-terminated, begins with it.
func isName(value []byte, name string) bool {
	text, _, whole := bytes.Cut(value, []byte{0})
	if whole {
		return string(text) == name
	}
	return strings.HasPrefix(name, string(text))
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
		if to := (target{e.Code, e.Chain}); !seen[to] {
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

// candidates returns the elements that may be the packet's, and whether there is one.
// mask is applied to the field.
func (p Packet) candidates(fields []string, mask []byte, m mapping) (all []nfnetlink.MapElement, found truth) {
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
func (p Packet) between(fields []string, mask []byte, bounds []nfnetlink.MapElement) truth {
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
	var a netip.Addr
	switch field {
	case "ip saddr", "ip6 saddr":
		a = p.Src
	case "ip daddr", "ip6 daddr":
		a = p.Dst
	}
	key := a.AsSlice()
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
		size, is := 4, func([]byte) truth { return maybe }
		if have := p.key(f, mask); have != nil {
			is = func(b []byte) truth { return truthOf(bytes.Equal(b, have)) }
		}
		if f == "iifname" || f == "oifname" {
			is = func(b []byte) truth { return p.named(f, b) }
		}
		if strings.HasPrefix(f, "ip6 ") {
			size = 16
		} else if strings.HasSuffix(f, "ifname") {
			size = unix.IFNAMSIZ
		}
		if len(key) < size && len(fields) > 1 {
			return maybe
		}
		size = min(size, len(key))
		result = min(result, is(key[:size]))
		key = key[size:]
	}
	return result
}

func (p Packet) named(field string, name []byte) truth {
	d := p.Out
	if field == "iifname" {
		if d = p.In; p.FromNode {
			return no
		}
	}
	if d.Name == "" {
		return maybe
	}
	return truthOf(isName(name, d.Name))
}
