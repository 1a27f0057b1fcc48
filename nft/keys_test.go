package nft_test

import (
	"reflect"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

// Two values of a key that has a meaning for connections have two hashes, and two rulesets.
func TestEachKeyOfThePolicyChangesHashAndRuleset(t *testing.T) {
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		var rulesets []nft.Ruleset
		files := k.Files()
		for _, text := range files {
			b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
				config.Source{Name: "f", Data: []byte(text)})
			if b.Ruleset == nil || b.Problems.Err() != nil {
				t.Fatalf("%s%v", text, b.Problems)
			}
			rulesets = append(rulesets, *b.Ruleset)
		}
		a, b := rulesets[0], rulesets[1]
		if equal := a.Hash() == b.Hash(); equal != k.NoPolicy {
			t.Errorf("equal hashes %t, want %t: Policy.digest has not %s, or newFamilyPolicy not its entries:\n%s\n%s", equal,
				k.NoPolicy, k.Name, files[0], files[1])
		}
		if same := a.Same(b) || b.Same(a); same != k.NoPolicy {
			t.Errorf("Ruleset.Same is %t, want %t:\n%s\n%s", same, k.NoPolicy, files[0], files[1])
		}
	})
}

// neverSet returns the fields that no value of a random type has, also those of the entries of
// its lists.
func neverSet(random func() any) []string {
	set, all := map[string]bool{}, []string{}
	var look func(prefix string, v reflect.Value)
	look = func(prefix string, v reflect.Value) {
		for i := range v.NumField() {
			f, name := v.Type().Field(i), prefix+v.Type().Field(i).Name
			if !f.IsExported() || f.Type == reflect.TypeFor[config.Position]() {
				continue
			}
			if _, seen := set[name]; !seen {
				set[name], all = false, append(all, name)
			}
			set[name] = set[name] || !v.Field(i).IsZero()
			if f.Type == reflect.TypeFor[[]config.SNATRule]() {
				for j := range v.Field(i).Len() {
					look(name+".", v.Field(i).Index(j))
				}
			}
		}
	}
	for range 2000 {
		look("", reflect.ValueOf(random()))
	}
	var never []string
	for _, name := range all {
		if !set[name] {
			never = append(never, name)
		}
	}
	return never
}

// What the maker of random configs and connections does not set is in no test with random ones.
func TestRandomConfigsAndConnectionsHaveEachField(t *testing.T) {
	m := cases.NewMaker(1)
	if never := neverSet(func() any { return m.Config() }); len(never) > 0 {
		t.Errorf("random configs never have %q: cases.Maker.Config", never)
	}
	random := func() any { return m.Connection(m.Near(m.Config(), false), m.Near(m.Config(), true)) }
	if never := neverSet(random); len(never) > 0 {
		t.Errorf("random connections never have %q: cases.Maker.Connection", never)
	}
}
