package native_test

import (
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

// decompile reads back the policy of a ruleset from its form in the kernel.
func decompile(t *testing.T, r nft.Ruleset) nft.Policy {
	t.Helper()
	found := native.OwnOf(r.Tables[0]).ReadBack()
	if !found.Exact || !found.Ours {
		t.Fatalf("not recognized as ours:\n%s", r)
	}
	return found.Policy
}

func TestPolicyIsReadBackFromItsRules(t *testing.T) { cases.CheckLaw(t, nft.ModeNFTables, decompile) }

func FuzzPolicyIsReadBackFromItsRules(f *testing.F) { cases.FuzzLaw(f, nft.ModeNFTables, decompile) }
