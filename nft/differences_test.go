package nft_test

import (
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/cases"
)

// leaves calls do with the bytes of each attribute of an expression that has no attributes.
func leaves(name string, a nfnetlink.Attrs, do func([]byte)) {
	nested := map[string][]uint16{
		"cmp": {unix.NFTA_CMP_DATA}, "immediate": {unix.NFTA_IMMEDIATE_DATA},
		"bitwise": {unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR},
		"range":   {unix.NFTA_RANGE_FROM_DATA, unix.NFTA_RANGE_TO_DATA}, "data": {unix.NFTA_DATA_VERDICT},
	}
	for typ, data := range a.All() {
		switch {
		case !slices.Contains(nested[name], typ):
			do(data)
		case name == "data":
			leaves("verdict", data, do)
		default:
			leaves("data", data, do)
		}
	}
}

// Each byte of each rule of each golden ruleset matters.
func TestRulesChangedByOneByteAreDifferences(t *testing.T) {
	cases.Each(t, func(t *testing.T, c cases.Case) {
		c.SkipIfShort(t)
		for _, m := range c.Modes() {
			for _, table := range c.Compile(m).Tables {
				live := nft.Sides{}
				for _, s := range table.Sets {
					live[s.Name] = s.Name + nft.SideB
				}
				for _, chain := range table.Chains {
					for i := range chain.Rules {
						one := nft.Chain{Name: chain.Name, Rules: chain.Rules[i : i+1]}
						changeEachByte(t, one, table, live)
					}
				}
			}
		}
	})
}

// changeEachByte compares a chain of one rule with changed ones.
func changeEachByte(t *testing.T, chain nft.Chain, table nft.Table, live nft.Sides) {
	t.Helper()
	rules := chain.Bytecode(table, live)
	r := &rules[0]
	r.Exprs, r.UserData = slices.Clone(r.Exprs), slices.Clone(r.UserData)
	for i := range r.Exprs {
		r.Exprs[i].Attrs = slices.Clone(r.Exprs[i].Attrs)
	}
	differs := func(what string, want bool) {
		t.Helper()
		if diffs := chain.Differences("here", table, live, rules, nil); (len(diffs) > 0) != want {
			t.Errorf("chain %s: %s: %s: differences %q", chain.Name, chain.Rules[0], what, diffs)
		}
	}
	flip := func(b []byte, what string, want bool) {
		t.Helper()
		for at := range b {
			b[at] ^= 1
			differs(fmt.Sprintf("byte %d of %s", at, what), want)
			b[at] ^= 1
		}
	}
	differs("unchanged", false)
	for _, e := range r.Exprs {
		leaves(e.Name, e.Attrs, func(b []byte) { flip(b, e.Name, e.Name != "counter") })
	}
	flip(r.UserData, "the comment", true)
	whole := *r
	r.Exprs = nil
	differs("only the comment is left", true)
	r.Exprs = whole.Exprs[:len(whole.Exprs)-1]
	differs("no verdict", true)
	*r = whole
	r.UserData = append(slices.Clone(r.UserData), 0)
	differs("a longer comment", true)
	rules = nil
	differs("no rule", true)
}
