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

// untranslatedChain is the chain that drops what would leave untranslated: conntrack has no
// connection for a packet that it calls invalid, so no program masquerades it. It runs
// after all chains that translate, which such packets do not pass.
const (
	untranslatedChain    = "untranslated"
	untranslatedPriority = nft.SrcNAT + 20
)

// compileUntranslated decides like the base chain, and drops what that masquerades.
func compileUntranslated(p nft.Policy) nft.Chain {
	hook := nft.NATHook(untranslatedPriority)
	hook.Type = "filter"
	c := nft.Chain{Name: untranslatedChain, Hook: hook, Rules: []nft.Rule{
		{Nodes: []nft.Node{valid{}, stop{}}, Comment: "of a connection, or not tracked"},
	}}
	for _, f := range p.Families {
		if !p.Drops(f) {
			continue
		}
		c.Rules = append(
			c.Rules,
			nft.Rule{
				Nodes:   []nft.Node{ofFamilyMatch{f.IPv6}, notUnicast{}, stop{}},
				Comment: "to this node, multicast or broadcast",
			},
			nft.Rule{Nodes: []nft.Node{ofFamilyMatch{f.IPv6}, ofThisNode{Source: true}, stop{}}, Comment: "from this node"},
		)
		f.Questions = slices.DeleteFunc(slices.Clone(f.Questions), func(q nft.Question) bool { return q.Asks == config.SentByNode })
		c.Rules = append(c.Rules, decisions(f, []nft.Node{stop{}}, []nft.Node{count{invalidCounter(f)}, drop{}})...)
	}
	return c
}

// invalidCounter is the name of the counter of dropped packets.
func invalidCounter(f nft.FamilyPolicy) string { return string(nft.Invalid) + f.Suffix() }

// valid matches packets that connection tracking does not call invalid.
type valid struct{}

func (valid) String() string { return "ct state != invalid" }

func (valid) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f,
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, expr.CtStateBitINVALID)})
}

// notUnicast matches packets to an address of this node, and to several nodes.
type notUnicast struct{}

func (notUnicast) String() string { return "fib daddr type != unicast" }

func (notUnicast) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f,
		&expr.Fib{Register: reg1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, unix.RTN_UNICAST)})
}

// drop drops the packet.
type drop struct{}

func (drop) String() string { return "drop" }

func (drop) Bytecode(f nfnetlink.Family, _ nft.Sides) []nfnetlink.Expr {
	return nfnetlink.Marshal(f, &expr.Verdict{Kind: expr.VerdictDrop})
}
