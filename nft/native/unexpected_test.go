package native_test

import (
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/cases"
)

// readUnexpected reads back rules from any program, without a panic.
func readUnexpected(_ *testing.T, _ nfnetlink.Family, rules []nfnetlink.Rule) {
	own := native.OwnWith(rules)
	_ = own.ReadBack()
}

// repairUnexpected also compares them with the rules of the defaults, and plans
// the repair.
func repairUnexpected(t *testing.T, family nfnetlink.Family, rules []nfnetlink.Rule) {
	readUnexpected(t, family, rules)
	own := native.OwnWith(rules)
	want := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}}).Tables[0]
	_ = own.Differences(want)
	_, sides := native.Stage(&nfnetlink.Batch{}, want, own, native.SmallBatch)
	native.Flip(&nfnetlink.Batch{}, want, sides, own)
}

func FuzzReadBack(f *testing.F) { cases.FuzzReadBack(f, readUnexpected) }

func FuzzRawRules(f *testing.F) { cases.FuzzRawRules(f, repairUnexpected) }

func TestRulesWithOnlyOurCommentsAreReadBack(t *testing.T) { cases.EachCommented(t, repairUnexpected) }

func TestRulesChangedByOneByteAreReadBack(t *testing.T) { cases.EachChangedByte(t, readUnexpected) }
