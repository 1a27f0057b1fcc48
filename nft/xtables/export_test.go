package xtables

import "nft-masq-agent/nft/nfnetlink"

// SharedWith returns what the kernel would hold: these rules in POSTROUTING, and these
// chains.
func SharedWith(family nfnetlink.Family, post []nfnetlink.Rule, chains map[string][]nfnetlink.Rule) *Shared {
	return &Shared{Family: family, present: true, rules: post, chains: chains}
}

// SameXT compares rules as the package does.
var SameXT = sameXT
