package native

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables/expr"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// enforceChain is the chain that keeps other programs from translating what pods
// send to exempt destinations. It runs before theirs: the first chain that sets
// the source address of a connection decides, also if it is the one that it has.
const enforceChain = "enforce"

// compileEnforcement decides like the base chain. It assigns exempt pod traffic
// its own source address; everything else continues.
func compileEnforcement(p nft.Policy) nft.Chain {
	c := nft.Chain{Name: enforceChain, Hook: nft.NATHook(nft.EnforcePriority)}
	for _, m := range p.Enforce.Marks {
		c.Rules = append(c.Rules, nft.Rule{Nodes: []nft.Node{hasMark(m), stop{}}, Comment: "left to the program that marked it"})
	}
	for _, f := range p.Families {
		if !f.KnowsPods() {
			continue
		}
		c.Rules = append(c.Rules,
			nft.Rule{Nodes: []nft.Node{ofFamilyMatch{f.IPv6}, ofThisNode{}, stop{}}, Comment: "to this node"},
			nft.Rule{Nodes: []nft.Node{ofFamilyMatch{f.IPv6}, ofThisNode{Source: true}, stop{}}, Comment: "from this node"})
		for _, q := range f.Questions {
			if q.Asks == config.SentByNode {
				continue
			}
			for _, match := range matches(q, f) {
				r := nft.Rule{Nodes: append(match, count{"exempt" + f.Suffix()}, keepSource{f.IPv6})}
				switch {
				case q.Masquerade:
					r.Nodes = append(match, stop{})
				case q.LimitsSources():
					r = nft.Rule{Nodes: append(match, stop{}), Comment: "not from a pod"}
				}
				c.Rules = append(c.Rules, r)
			}
		}
	}
	return c
}

// hasMark matches packets with a mark.
type hasMark nft.Mark

func (m hasMark) String() string {
	if m.Mask == 1<<32-1 {
		return fmt.Sprintf("meta mark 0x%08x", m.Value)
	}
	return fmt.Sprintf("meta mark & 0x%08x == 0x%08x", m.Mask, m.Value)
}

func (m hasMark) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	word := func(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
	es := nfnetlink.Marshal(f, &expr.Meta{Key: expr.MetaKeyMARK, Register: reg1})
	if m.Mask != 1<<32-1 {
		es = append(es, nfnetlink.Marshal(f, &expr.Bitwise{
			SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: word(m.Mask), Xor: word(0),
		})...)
	}
	return append(es, nfnetlink.Marshal(f, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: word(m.Value)})...)
}

// leftMark reads the mark from a rule of the enforcing chain.
func leftMark(r nfnetlink.Rule) (nft.Mark, bool) {
	for s := range rule.Statements(r) {
		if s.Field != "meta mark" || len(s.Value) != 4 {
			break
		}
		m := nft.Mark{Value: binary.NativeEndian.Uint32(s.Value), Mask: 1<<32 - 1}
		if len(s.Mask) == 4 {
			m.Mask = binary.NativeEndian.Uint32(s.Mask)
		}
		return m, true
	}
	return nft.Mark{}, false
}

// keepSource assigns a connection its current source address.
type keepSource struct{ IPv6 bool }

func (k keepSource) String() string {
	if k.IPv6 {
		return "snat ip6 to ip6 saddr"
	}
	return "snat ip to ip saddr"
}

func (k keepSource) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	to := nfnetlink.SourceNAT(nft.FamilyPolicy{IPv6: k.IPv6}.Family(), false, reg1, 0, 0)
	return append(nfnetlink.Marshal(f, nfnetlink.AddressPayload(k.IPv6, true)), to)
}
