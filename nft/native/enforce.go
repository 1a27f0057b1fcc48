package native

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
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
		c.Rules = append(c.Rules, nft.Rule{
			Nodes: []nft.Node{hasMark(m), stop()}, Comment: "left to the program that marked it",
		})
	}
	for _, f := range p.Families {
		if !f.KnowsPods() {
			continue
		}
		c.Rules = append(c.Rules,
			nft.Rule{Nodes: []nft.Node{ofFamily(f.IPv6), toThisNode(), stop()}, Comment: "to this node"},
			nft.Rule{Nodes: []nft.Node{ofFamily(f.IPv6), fromThisNode(), stop()}, Comment: "from this node"})
		left := nft.Rule{
			Nodes: []nft.Node{toItself{f.IPv6, selfSet(f)}, stop()}, Comment: "back to the pod that it came from",
		}
		asked := false
		for _, q := range f.Questions {
			if q.Asks == config.SentByNode {
				continue
			}
			if !asked && !q.LimitsSources() { // from here on, all sources are pods
				c.Rules, asked = append(c.Rules, left), true
			}
			for _, match := range matches(q, f) {
				r := nft.Rule{Nodes: append(match, count("exempt"+f.Suffix()), keepSource(f))}
				switch {
				case q.Masquerade:
					r.Nodes = append(match, stop())
				case q.LimitsSources():
					r = nft.Rule{Nodes: append(match, stop()), Comment: "not from a pod"}
				}
				c.Rules = append(c.Rules, r)
			}
		}
		if !asked {
			c.Rules = append(c.Rules, left)
		}
	}
	return c
}

// selfSet is the name of the set by which [toItself] compares two addresses.
func selfSet(f nft.FamilyPolicy) string { return "self" + f.Suffix() }

// toItself matches a packet whose destination was translated to its source: a pod's
// connection to itself through a Service or a host port. It works only if another
// program translates its source, too: the pod drops packets from its own address.
//
// nf_tables cannot compare two fields of a packet. But rules can add to a set: this one
// adds the pair of the source and itself, and then asks for the pair of source and
// destination. The set has no others, whichever packets added them.
type toItself struct {
	IPv6 bool
	Set  string
}

// learnedFor is how long a set keeps a pair.
const learnedFor = time.Minute

func (m toItself) String() string {
	ip := "ip"
	if m.IPv6 {
		ip = "ip6"
	}
	return fmt.Sprintf("ct status dnat update @%s%s { %s saddr . %[3]s saddr timeout 1m } %[3]s saddr . %[3]s daddr "+
		"@%[1]s%[2]s", m.Set, nft.SideA, ip)
}

func (m toItself) Bytecode(f nfnetlink.Family, s nft.Sides) []nfnetlink.Expr {
	const dnat = 1 << 5 // IPS_DST_NAT
	// The second address follows the first one: registers 1 to 4 have 16 bytes, those
	// from 8 on 4, in the same memory.
	second := uint32(unix.NFT_REG32_01)
	if m.IPv6 {
		second = reg2
	}
	pair := func(source bool) []expr.Any {
		a, b := nfnetlink.AddressPayload(m.IPv6, true), nfnetlink.AddressPayload(m.IPv6, source)
		b.DestRegister = second
		return []expr.Any{a, b}
	}
	es := nfnetlink.Marshal(f,
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg1},
		&expr.Bitwise{
			SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, dnat),
			Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: make([]byte, 4)})
	es = append(es, ofFamily(m.IPv6).Exprs...)
	es = append(es, nfnetlink.Marshal(f, pair(true)...)...)
	es = append(es, nfnetlink.Marshal(f, &expr.Dynset{
		SrcRegKey: reg1, SetName: s.Of(m.Set), Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: learnedFor,
	})...)
	es = append(es, nfnetlink.Marshal(f, pair(false)...)...)
	return append(es, nfnetlink.Marshal(f, &expr.Lookup{SourceRegister: reg1, SetName: s.Of(m.Set)})...)
}

// hasMark matches packets with a mark.
func hasMark(m nft.Mark) nft.Node {
	word := func(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
	load := &expr.Meta{Key: expr.MetaKeyMARK, Register: reg1}
	compare := &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: word(m.Value)}
	if m.Mask == 1<<32-1 {
		return plain(fmt.Sprintf("meta mark 0x%08x", m.Value), load, compare)
	}
	return plain(fmt.Sprintf("meta mark & 0x%08x == 0x%08x", m.Mask, m.Value), load,
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: word(m.Mask), Xor: word(0)}, compare)
}

// keepSource assigns a connection its current source address.
func keepSource(f nft.FamilyPolicy) nft.Node {
	n := plain("snat ip to ip saddr", nfnetlink.AddressPayload(f.IPv6, true))
	if f.IPv6 {
		n.Text = "snat ip6 to ip6 saddr"
	}
	n.Exprs = append(n.Exprs, nfnetlink.SourceNAT(f.Family(), false, reg1, 0, 0))
	return n
}
