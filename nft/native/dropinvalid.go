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

// The chain of dropInvalid finds packets that would leave untranslated: conntrack has no connection for a packet that
// it calls invalid, so no program masquerades it. The chain runs after all chains that translate, which such packets do
// not pass. Every other packet pays for one comparison; a rule that returns would cost as much again.
const (
	untranslatedChain    = "untranslated"
	untranslatedPriority = nft.SrcNAT + 20
	dropChain            = "drop-invalid"
)

// compileUntranslated returns the chain and, before it, the one in which it continues. That has the conditions of the
// base chain, and drops what the base chain masquerades.
func compileUntranslated(p nft.Policy) []nft.Chain {
	hook := &nfnetlink.Hook{Type: "filter", Number: unix.NF_INET_POST_ROUTING, Priority: untranslatedPriority}
	first := nft.Chain{Name: untranslatedChain, Hook: hook, Rules: []nft.Rule{
		{Statements: []nft.Statement{invalid(), continueIn(dropChain)}, Comment: "of no connection"},
	}}
	c := nft.Chain{Name: dropChain}
	for _, f := range p.Families {
		if !p.Drops(f) {
			continue
		}
		c.Rules = append(append(c.Rules, toThisNodeOrSeveral(f.IPv6)...), nft.Rule{
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

// toThisNodeOrSeveral returns the rules for packets to this node, and for multicast and broadcast. The type of an IPv6
// address is unknown if the route to it depends on more than the address, so that its prefix is compared.
func toThisNodeOrSeveral(ipv6 bool) []nft.Rule {
	if !ipv6 {
		several := addrType("fib daddr type != unicast", false, expr.CmpOpNeq, unix.RTN_UNICAST)
		return []nft.Rule{{
			Statements: []nft.Statement{ofFamily(false), several, stop()},
			Comment:    "to this node, multicast or broadcast",
		}}
	}
	firstByte := nfnetlink.AddressPayload(true, false)
	firstByte.Len = 1
	multicast := withFamilyCheck(true, statement("ip6 daddr ff00::/8",
		firstByte, &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{0xff}}))
	return []nft.Rule{
		{Statements: []nft.Statement{ofFamily(true), toThisNode(), stop()}, Comment: "to this node"},
		{Statements: []nft.Statement{multicast, stop()}, Comment: "multicast"},
	}
}

// drop drops the packet.
func drop() nft.Statement { return statement("drop", &expr.Verdict{Kind: expr.VerdictDrop}) }
