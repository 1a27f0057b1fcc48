package xtables

import (
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
)

func TestChainNamesThatIPTablesRejectsAreRejected(t *testing.T) {
	tests := map[string]string{ // name: the reason, "" for a valid one
		"IP-MASQ-AGENT":         "",
		"IP-MASQ":               "",
		"NON-MASQUERADE-DAEMON": "",
		"masquerade":            "", // only the target in capitals is reserved
		"postrouting":           "",
		"a!-b":                  "",
		strings.Repeat("A", 28): "",
		strings.Repeat("A", 29): "has 29 characters, iptables takes at most 28",
		"":                      "is empty",
		"-x":                    "begins with '-'",
		"!x":                    "begins with '!'",
		"A B":                   "has white space",
		"A\tB":                  "has white space",
		"A\u00a0B":              "has white space",
		"A\x7fB":                "does not print",
		"A\"B":                  "has a quote",
		`A\B`:                   "a backslash",
		"POSTROUTING":           "is a built-in chain",
		"MASQUERADE":            "is a target of iptables",
		"RETURN":                "is a target of iptables",
		"TCPMSS":                "is a target of iptables",
	}
	for name, want := range tests {
		err := CheckChain(name)
		switch {
		case want == "" && err != nil:
			t.Errorf("CheckChain(%q): %v", name, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("CheckChain(%q): %v, want %q", name, err, want)
		}
	}
}

func TestAdditionalChainsLimitTheNameLength(t *testing.T) {
	plain := config.Default(config.Defaults{})
	some := []config.CIDR{{Prefix: netip.MustParsePrefix("10.1.0.0/16")}}
	sources, forced := plain, plain
	sources.MasqueradeSrcCIDRs = some
	forced.ForceMasqueradeCIDRs = some
	ports := []nft.PortRange{{Min: 1024, Max: 2047}}
	name23, name24 := strings.Repeat("A", 23), strings.Repeat("A", 24)
	tests := []struct {
		name   string
		config config.Config
		layout nft.Layout
		ports  []nft.PortRange
		ok     bool
	}{
		{"no further chain", plain, Layout{name24}, nil, true},
		{"sources", sources, Layout{name24}, nil, false},
		{"sources, short name", sources, Layout{name23}, nil, true},
		{"forced without ports", forced, Layout{name24}, nil, true},
		{"forced with ports", forced, Layout{name24}, ports, false},
		{"forced with ports, short name", forced, Layout{name23}, ports, true},
		{"mode nftables", sources, native.Layout{}, nil, true},
	}
	for _, tt := range tests {
		err := tt.layout.CheckTables(nft.Compile(tt.config, nft.Options{Layout: tt.layout, Ports: tt.ports}).Tables)
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
		if err != nil && !strings.Contains(err.Error(), "at most 23") {
			t.Errorf("%s: %v does not name the limit", tt.name, err)
		}
	}
}
