package xtables

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// bytecode returns the rules of our chain as we write them: signed, and the last one
// with the hash of the policy.
func (s *State) bytecode(t nft.Table) []nfnetlink.Rule {
	rules := t.Chain(s.name).Bytecode(t, nil)
	for i := range rules {
		rules[i].UserData = nfnetlink.Signature()
	}
	rules[len(rules)-1].UserData = nfnetlink.SignatureWith(s.hash)
	return rules
}

// sameExprs compares rules of the shared tables without user data, in which programs
// keep their own notes.
func sameExprs(a, b nfnetlink.Rule) bool { return nfnetlink.Same(a.Exprs, b.Exprs) }
