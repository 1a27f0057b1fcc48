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
func (p Packet) holds(c *Chain, s rule.Statement, r nfnetlink.Rule, member func(nfnetlink.Family, string, string, netip.Addr) (bool, error)) truth {
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
		return unmarked(c, s)
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

// unmarked evaluates a comparison of the mark of a packet without kube-proxy's
// and portmap's bits.
func unmarked(c *Chain, s rule.Statement) truth {
	var m match
	m.compareMark(s, s.Op != "!=")
	if len(m.marks) != 1 || s.Op != "==" && s.Op != "!=" {
		return maybe
	}
	set := m.marks[0]
	ours := set.mask&^(kubeProxyMark|portmapMark) == 0 || set.mask == 0xffffffff && (set.value == kubeProxyMark || set.value == portmapMark)
	if !ours && c.Name != "KUBE-POSTROUTING" && c.Table != "kube-proxy" {
		return maybe
	}
	return truthOf(set.value == 0).is(!set.not)
}

// address evaluates a comparison of an address.
func (p Packet) address(a netip.Addr, s rule.Statement, r nfnetlink.Rule, member func(nfnetlink.Family, string, string, netip.Addr) (bool, error)) truth {
	if strings.HasPrefix(s.Field, "ip6 ") != p.Dst.Is6() {
		return no // nft checks the family first
	}
	if s.Set != "" && s.Mask == nil && a.IsValid() && (s.Op == "==" || s.Op == "!=") {
		in, err := member(r.Family, r.Table, s.Set, a)
		if err != nil {
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

// lookup returns the verdicts that a map may have for the packet.
func (t *Tracer) lookup(c *Chain, s rule.Statement) ([]target, truth) {
	field, _, _ := strings.Cut(s.String(), " vmap @")
	elements, ok := t.maps[id{c.Family, c.Table, s.Expr.Str(unix.NFTA_LOOKUP_SET)}]
	if !ok {
		return t.anyTarget(c), maybe
	}
	var found []target
	all := no
	for _, e := range elements {
		if truth := t.packet.meets(strings.Split(field, " . "), e.Key); truth != no {
			all = max(all, truth)
			if to := (target{e.Code, e.Chain}); !slices.Contains(found, to) {
				found = append(found, to)
			}
		}
	}
	return found, all
}

// anyTarget returns the verdicts that an unread map may have: a jump to any chain
// of the table that is not a base chain.
func (t *Tracer) anyTarget(c *Chain) (found []target) {
	for _, to := range t.Chains {
		if to.Hook == nil && to.Family == c.Family && to.Table == c.Table {
			found = append(found, target{unix.NFT_JUMP, to.Name})
		}
	}
	return found
}

// meets reports whether the packet matches a key. Each component of a
// concatenation is padded to four bytes.
func (p Packet) meets(fields []string, key []byte) truth {
	result := yes
	for _, f := range fields {
		size, is := 4, func([]byte) truth { return maybe }
		switch f {
		case "ip daddr", "ip6 daddr":
			is = func(b []byte) truth { return truthOf(bytes.Equal(b, p.Dst.AsSlice())) }
		case "ip saddr", "ip6 saddr":
			if p.Src.IsValid() {
				is = func(b []byte) truth { return truthOf(bytes.Equal(b, p.Src.AsSlice())) }
			}
		case "iifname", "oifname":
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
