package xtables

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// SharedWith returns a table as read from the kernel, with these rules in
// POSTROUTING, and these chains.
func SharedWith(family nfnetlink.Family, post []nfnetlink.Rule, chains map[string][]nfnetlink.Rule) *Shared {
	return &Shared{Family: family, present: true, rules: post, chains: chains}
}

// SameXT compares rules like the package.
var SameXT = sameXT

// Plan plans the changes from a table to the wanted one.
func (n *Shared) Plan(b *nfnetlink.Batch, want nft.Table, chain string) { n.ensure(b, want, chain) }
