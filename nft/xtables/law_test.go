package xtables_test

import (
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// decompile reads back the policy of a ruleset from its form in the kernel.
func decompile(t *testing.T, r nft.Ruleset) nft.Policy {
	t.Helper()
	var out nft.Policy
	for _, table := range r.Tables {
		chains := map[string][]nfnetlink.Rule{}
		for _, c := range table.Chains {
			chains[c.Name] = c.Bytecode(table, nil)
		}
		p, err := xtables.SharedWith(table.Family, nil, chains).Policy(xtables.OwnChain{Name: r.Chain(), Text: r.Chain()})
		if err != nil {
			t.Fatalf("%v:\n%s", err, r)
		}
		p.Families = append(out.Families, p.Families...)
		out = p
	}
	return out
}

func TestPolicyIsReadBackFromItsRules(t *testing.T) { cases.CheckLaw(t, nft.ModeIPTables, decompile) }

func FuzzPolicyIsReadBackFromItsRules(f *testing.F) { cases.FuzzLaw(f, nft.ModeIPTables, decompile) }
