package xtables_test

import (
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

var ours = xtables.OwnChain{Name: cases.DefaultChain, Text: cases.DefaultChain}

// unexpected returns a table with these rules in POSTROUTING and in our chain.
func unexpected(family nfnetlink.Family, rules []nfnetlink.Rule) *xtables.Shared {
	return xtables.SharedWith(family, rules, map[string][]nfnetlink.Rule{cases.DefaultChain: rules})
}

// readUnexpected reads back rules from any program: nothing panics, and only what
// we write counts as ours.
func readUnexpected(t *testing.T, family nfnetlink.Family, rules []nfnetlink.Rule) {
	t.Helper()
	n := unexpected(family, rules)
	if p, err := n.Policy(ours); err == nil {
		want := xtables.SharedTable(p.Families[0], p, cases.DefaultChain, xtables.CommentPrefixes(cases.DefaultChain)[0]).Chain(cases.DefaultChain)
		if !slices.EqualFunc(want.Bytecode(nft.Table{Family: family}, nil), rules, xtables.SameXT) {
			t.Errorf("%v is recognized as ours", rules)
		}
	}
	_ = n.Ours()
	_ = n.Foreign(cases.DefaultChain)
	_ = n.Held(ours)
}

// repairUnexpected also compares them with the rules of the defaults, and plans
// the repair.
func repairUnexpected(t *testing.T, family nfnetlink.Family, rules []nfnetlink.Rule) {
	readUnexpected(t, family, rules)
	n := unexpected(family, rules)
	want := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}}).Tables[0]
	_ = n.Differences(want, cases.DefaultChain)
	n.Plan(&nfnetlink.Batch{}, want, cases.DefaultChain)
}

func FuzzReadBack(f *testing.F) { cases.FuzzReadBack(f, readUnexpected) }

func FuzzRawRules(f *testing.F) { cases.FuzzRawRules(f, repairUnexpected) }

func TestRulesWithOnlyOurCommentsAreReadBack(t *testing.T) { cases.EachCommented(t, repairUnexpected) }

func TestRulesChangedByOneByteAreReadBack(t *testing.T) { cases.EachChangedByte(t, readUnexpected) }
