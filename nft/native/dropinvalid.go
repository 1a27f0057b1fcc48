package native

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// untranslatedChain is the chain that finds what would leave untranslated: conntrack has no
// connection for a packet that it calls invalid, so no program masquerades it. It runs
// after all chains that translate, which such packets do not pass. Everything else pays
// for one comparison, and IPv6 for another two; a rule that returns would cost as much again.
const (
	untranslatedChain    = "untranslated"
	untranslatedPriority = nft.SrcNAT + 20
	dropChain            = "drop-invalid"
)

// compileUntranslated returns the chain, and the one that it continues in, which decides
// like the base chain, and drops what that masquerades.
func compileUntranslated(p nft.Policy) []nft.Chain {
	hook := nft.NATHook(untranslatedPriority)
	hook.Type = "filter"
	first := nft.Chain{Name: untranslatedChain, Hook: hook, Rules: []nft.Rule{
		{Statements: []nft.Statement{invalid(), continueIn(dropChain)}, Comment: "of no connection, and tracked"},
	}}
	if slices.ContainsFunc(p.Families, func(f nft.FamilyPolicy) bool { return f.IPv6 && p.Drops(f) }) {
		first.Rules = append(first.Rules, nft.Rule{
			Statements: []nft.Statement{beyondItsLink(), continueIn(dropChain)}, Comment: "untracked, and beyond its link",
		})
	}
	c := nft.Chain{Name: dropChain}
	for _, f := range p.Families {
		if !p.Drops(f) {
			continue
		}
		c.Rules = append(append(c.Rules, notToOneElsewhere(f.IPv6)...), nft.Rule{
			Statements: []nft.Statement{ofFamily(f.IPv6), fromThisNode(), stop()}, Comment: "from this node",
		})
		f.Conditions = slices.DeleteFunc(slices.Clone(f.Conditions),
			func(condition nft.Condition) bool { return condition.Asks == config.SentByNode })
		c.Rules = append(c.Rules, decisions(f, []nft.Statement{stop()}, []nft.Statement{count(invalidCounter(f)), drop()})...)
	}
	return []nft.Chain{c, first}
}

// invalidCounter is the name of the counter of dropped packets.
func invalidCounter(f nft.FamilyPolicy) string { return string(nft.Invalid) + f.Suffix() }

// invalid matches packets that connection tracking calls invalid, which have no other state.
func invalid() nft.Statement {
	return statement("ct state == invalid",
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitINVALID)})
}

// beyondItsLink matches neighbor, multicast listener and multicast router discovery that was
// routed, which no receiver accepts (RFC 4861, 3810 and 4286). Conntrack does not track these
// types of ICMPv6, and calls the others from 130 to 152 invalid, or new. Neighbor discovery
// between the ports of a bridge has a hop limit of 255, which a router lowers.
func beyondItsLink() nft.Statement {
	const first, last, hopLimit = 130, 152, 7 // hopLimit is an offset
	return withFamilyCheck(true, statement("icmpv6 type 130-152 ip6 hoplimit != 255 ct state == untracked",
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{unix.IPPROTO_ICMPV6}},
		&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Len: 1},
		&expr.Cmp{Op: expr.CmpOpGte, Register: reg1, Data: []byte{first}},
		&expr.Cmp{Op: expr.CmpOpLte, Register: reg1, Data: []byte{last}},
		&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: hopLimit, Len: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: []byte{255}},
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitUNTRACKED)}))
}

// notToOneElsewhere returns the rules for packets to this node, and to several nodes. The type
// of an IPv6 address is unknown where the route to it depends on more than the address.
func notToOneElsewhere(ipv6 bool) []nft.Rule {
	if !ipv6 {
		several := addrType("fib daddr type != unicast", false, expr.CmpOpNeq, unix.RTN_UNICAST)
		return []nft.Rule{{
			Statements: []nft.Statement{ofFamily(false), several, stop()},
			Comment:    "to this node, multicast or broadcast",
		}}
	}
	first := nfnetlink.AddressPayload(true, false)
	first.Len = 1
	multicast := withFamilyCheck(true, statement("ip6 daddr ff00::/8",
		first, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{0xff}}))
	return []nft.Rule{
		{Statements: []nft.Statement{ofFamily(true), toThisNode(), stop()}, Comment: "to this node"},
		{Statements: []nft.Statement{multicast, stop()}, Comment: "multicast"},
	}
}

// drop drops the packet.
func drop() nft.Statement { return statement("drop", &expr.Verdict{Kind: expr.VerdictDrop}) }
