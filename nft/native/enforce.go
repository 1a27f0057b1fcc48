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
			Statements: []nft.Statement{hasMark(m), stop()}, Comment: "left to the program that marked it",
		})
	}
	for _, f := range p.Families {
		if !f.KnowsPods() {
			continue
		}
		c.Rules = append(c.Rules,
			nft.Rule{Statements: []nft.Statement{ofFamily(f.IPv6), toThisNode(), stop()}, Comment: "to this node"},
			nft.Rule{Statements: []nft.Statement{ofFamily(f.IPv6), fromThisNode(), stop()}, Comment: "from this node"})
		hairpin := nft.Rule{
			Statements: []nft.Statement{toItself(f), stop()}, Comment: "back to the pod that it came from",
		}
		// The conditions that limit the sources to pods come first. Behind them all sources are pods, and a hairpin is
		// left alone before a condition can exempt it.
		hairpinAdded := false
		for _, condition := range f.Conditions {
			if condition.Asks == config.SentByNode {
				continue
			}
			if !hairpinAdded && !condition.LimitsSources() {
				c.Rules = append(c.Rules, hairpin)
				hairpinAdded = true
			}
			action := []nft.Statement{count("exempt" + f.Suffix()), keepSource(f)}
			comment := ""
			switch {
			case condition.Masquerade:
				action = []nft.Statement{stop()}
			case condition.LimitsSources():
				action = []nft.Statement{stop()}
				comment = "not from a pod"
			}
			for _, match := range matches(condition, f) {
				c.Rules = append(c.Rules, nft.Rule{Statements: append(match, action...), Comment: comment})
			}
		}
		if !hairpinAdded {
			c.Rules = append(c.Rules, hairpin)
		}
	}
	return c
}

// selfSet is the name of the set by which [toItself] compares two addresses.
func selfSet(f nft.FamilyPolicy) string { return "self" + f.Suffix() }

// toItself matches a packet whose destination was translated to its source: a pod's
// connection to itself through a Service or a host port. It works only if another
// program translates its source, too: the pod drops packets from its own address.
// The addresses alone show it, because IPVS does not set ct status dnat.
//
// nf_tables cannot compare two fields of a packet. But rules can add to a set: this one
// adds the pair of the source and itself, and then asks for the pair of source and
// destination. The set has no others, whichever packets added them. If it is full, the
// rule does not match until pairs expire.
func toItself(f nft.FamilyPolicy) nft.Statement {
	// The second address follows the first one: registers 1 to 4 have 16 bytes, those
	// from 8 on 4, in the same memory.
	ip := "ip"
	second := uint32(unix.NFT_REG32_01)
	set := selfSet(f) + nft.SideA
	if f.IPv6 {
		ip = "ip6"
		second = reg2
	}
	source := nfnetlink.AddressPayload(f.IPv6, true)
	repeated := nfnetlink.AddressPayload(f.IPv6, true)
	destination := nfnetlink.AddressPayload(f.IPv6, false)
	repeated.DestRegister = second
	destination.DestRegister = second
	text := fmt.Sprintf("update @%s { %s saddr . %[2]s saddr timeout %[3]s } %[2]s saddr . %[2]s daddr @%[1]s", set, ip,
		learnedFor)
	return withFamilyCheck(f.IPv6, statement(text,
		source, repeated,
		&expr.Dynset{SrcRegKey: reg1, SetName: set, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: learnedFor},
		source, destination, &expr.Lookup{SourceRegister: reg1, SetName: set}))
}

// learnedFor is how long a set keeps a pair: a flood of sources fills it for no longer.
const learnedFor = time.Second

func hasMark(m nft.Mark) nft.Statement {
	word := func(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
	text := fmt.Sprintf("meta mark 0x%08x", m.Value)
	es := []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1}}
	if m.Mask != 1<<32-1 {
		text = fmt.Sprintf("meta mark & 0x%08x == 0x%08x", m.Mask, m.Value)
		es = append(es, &expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: word(m.Mask), Xor: word(0)})
	}
	return statement(text, append(es, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: word(m.Value)})...)
}

// keepSource assigns a connection its current source address.
func keepSource(f nft.FamilyPolicy) nft.Statement {
	n := statement(snatText(f)+addressText(f.IPv6, true), nfnetlink.AddressPayload(f.IPv6, true))
	n.Exprs = append(n.Exprs, nfnetlink.SourceNAT(f.NetfilterFamily(), false, reg1, 0, 0))
	return n
}
