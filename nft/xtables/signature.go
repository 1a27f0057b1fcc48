package xtables

import (
	"github.com/google/nftables/userdata"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
)

// Types of user data that iptables and nft do not know: they neither show nor preserve
// them.
const (
	signatureType = 200
	hashType      = 201
)

// signature is in the user data of each rule that we write into our chains. It
// distinguishes them from chains with the same text, which ip-masq-agent up to
// v2.0.0 writes.
var signature = userdata.AppendString(nil, signatureType, nft.TableName)

func signed(r nfnetlink.Rule) bool {
	return facts.UserData(r.UserData, signatureType) == nft.TableName
}

// bytecode returns the rules of a chain as we write them: signed, and the last one of our
// main chain with the hash of the policy.
func (s *State) bytecode(t nft.Table, chain string) []nfnetlink.Rule {
	rules := t.Chain(chain).Bytecode(t, nil)
	for i := range rules {
		rules[i].UserData = signature
	}
	if chain == s.chain && len(rules) > 0 {
		rules[len(rules)-1].UserData = userdata.AppendString(signature, hashType, s.hash)
	}
	return rules
}

// sameText compares rules of the shared tables without user data, in which programs
// keep their own notes.
func sameText(a, b nfnetlink.Rule) bool { return nfnetlink.Key(a.Exprs) == nfnetlink.Key(b.Exprs) }

// jumpOf returns the chain that a jump's comment names, in any version. The kernel allows
// longer names than iptables, and than fit our comment.
func jumpOf(r nfnetlink.Rule) (chain string, ok bool) {
	_, jumps := facts.Target(r)
	chain, ours := chainInComment(facts.Comment(r))
	return chain, jumps && ours && len(chain) <= maxChainName
}
