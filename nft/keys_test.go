package nft_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

// Each key that has a meaning for connections has it in the hash: a config without it, one with
// it, and one with another value have three rulesets.
func TestEachKeyOfThePolicyChangesHashAndRuleset(t *testing.T) {
	const other = "198.51.100.0/24"
	values := map[string][]string{ // the lists are [203.0.113.0/24] and [198.51.100.0/24]
		"masqueradeHost":                  {"false"},
		config.KeyEnforceNonMasquerade:    {"true"},
		config.KeyDropInvalid:             {"true"},
		config.KeyPortsPerPod:             {"1024", "2000"},
		config.KeyMasqueradeSrcInterfaces: {"[cni0]", "[cni1]"},
		"nonMasqueradeOutInterfaces":      {"[wg0]", "[wg1]"},
		"masqueradeOutInterfaces":         {"[eth0]", "[eth1]"},
		config.KeySNATRules: {
			"[{to: [192.0.2.0/24], addresses: [198.51.100.8]}]", "[{to: [192.0.2.0/24], addresses: [198.51.100.9]}]",
		},
	}
	for _, row := range slices.Concat(config.Conditions(), config.Translations()) {
		all := values[row.Key]
		if all == nil {
			all = []string{"[203.0.113.0/24]", "[" + other + "]"}
		}
		base := "masqueradeSrcCIDRs: [10.0.0.0/8]\n"
		if row.Key == config.KeyMasqueradeSrcCIDRs {
			base = ""
		}
		var rulesets []nft.Ruleset
		for _, text := range append([]string{""}, all...) {
			if text != "" {
				text = row.Key + ": " + text + "\n"
			}
			b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
				config.Source{Name: "f", Data: []byte(base + text)})
			if b.Ruleset == nil {
				t.Fatalf("%s: %v", text, b.Problems)
			}
			for _, r := range rulesets {
				if r.Hash() == b.Ruleset.Hash() || r.Same(*b.Ruleset) || b.Ruleset.Same(r) {
					t.Errorf("%q is the same as something else: %s", strings.TrimSpace(text), r.Hash())
				}
			}
			rulesets = append(rulesets, *b.Ruleset)
		}
	}
}

// A key that the maker of random configs does not set is in no test with random policies.
func TestRandomConfigsHaveEachFieldOfAConfig(t *testing.T) {
	// These do not concern a policy, and the last two are flags, too: they are in the random options.
	noPolicy := []string{"ResyncInterval", "StaleConnections", "CIDRLimit", "ToPorts", "RandomFully"}
	unset := map[string]bool{}
	typ := reflect.TypeFor[config.Config]()
	for i := range typ.NumField() {
		if f := typ.Field(i); f.IsExported() && !slices.Contains(noPolicy, f.Name) {
			unset[f.Name] = true
		}
	}
	m := cases.NewMaker(1)
	for range 2000 {
		v := reflect.ValueOf(m.Config())
		for name := range unset {
			if !v.FieldByName(name).IsZero() {
				delete(unset, name)
			}
		}
	}
	for name := range unset {
		t.Errorf("random configs never have %s", name)
	}
}
