package xtables

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// bytecode returns the rules of a chain as we write them: signed, and the last one of our
// main chain with the hash of the policy.
func (s *State) bytecode(t nft.Table, chain string) []nfnetlink.Rule {
	rules := t.Chain(chain).Bytecode(t, nil)
	for i := range rules {
		rules[i].UserData = nfnetlink.Signature()
	}
	if chain == s.chain && len(rules) > 0 {
		rules[len(rules)-1].UserData = nfnetlink.SignatureWith(s.hash)
	}
	return rules
}

// sameText compares rules of the shared tables without user data, in which programs
// keep their own notes.
func sameText(a, b nfnetlink.Rule) bool { return nfnetlink.Same(a.Exprs, b.Exprs) }

// JumpOf returns the chain that a jump's comment names, in any version. The kernel allows
// longer names than iptables, and than fit our comment.
func JumpOf(r nfnetlink.Rule) (chain string, ok bool) {
	_, jumps := r.Target()
	chain, ours := chainInComment(r.Comment())
	return chain, jumps && ours && len(chain) <= maxChainName
}
