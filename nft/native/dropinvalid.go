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
// for one comparison; a rule that returns would cost as much again.
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
		{Statements: []nft.Statement{invalid(), continueIn(dropChain)}, Comment: "of no connection"},
	}}
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
