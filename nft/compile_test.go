package nft_test

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfttest/cases"
)

// Without errors there is a ruleset: that of the config, or with mistakes what the
// older agents make of it.
func TestFilesWithMistakesAloneHaveARuleset(t *testing.T) {
	const octal = "enableIPv6: true\nnonMasqueradeCIDRs: [10.0.0.0/010, 172.16.0.0/12, fd00::/010]"
	const long = "A-CHAIN-OF-25-CHARACTERS-"
	for _, tt := range []struct {
		file  string
		chain string
		modes []nft.Mode
		level config.Level
		ids   string   // of the problems
		has   []string // in the ruleset; none: there is no ruleset
		lacks string
	}{
		{"", "", cases.Modes(), config.Note, "emptyFile", []string{"10.0.0.0/8", "192.168.0.0/16"}, "IPv6"},
		{"masqLinkLocal: true\nextra: 1", "", cases.Modes(), config.Warning, "unknownKey", []string{"10.0.0.0/8"}, "169.254"},
		{
			octal, "", cases.Modes(), config.Mistake, "octalLength,octalLength",
			[]string{"10.0.0.0/8", "172.16.0.0/12", "fd00::/8"},
			"10.0.0.0/10",
		},
		{
			"masqLinkLocal: true\n---\n@", "", cases.Modes(), config.Mistake, "secondDocument",
			[]string{"10.0.0.0/8"},
			"169.254",
		},
		{"nonMasqueradeCIDRs: [10.0.0.0/08]", "", cases.Modes(), config.Error, "invalidEntry", nil, ""},
		{"masqLinkLocal: 1\nmasqLinklLocal: true", "", cases.Modes(), config.Error, "wrongValue,misspelledKey", nil, ""},
		{"masqueradeHost: false", "", cases.Modes()[:1], config.Note, "", []string{"to this node"}, ""},
		{"masqueradeHost: false", "", cases.Modes()[1:], config.Error, "needsNFTables", nil, ""},
		{
			"masqueradeHost: false\nextra: 1\nextra: 1", "", cases.Modes()[1:], config.Error,
			"unknownKey,duplicateKey,unknownKey,needsNFTables", nil, "",
		},
		{"masqueradeSrcCIDRs: [10.0.0.0/8]", long, cases.Modes()[1:], config.Error, "kernel", nil, ""},
		{
			"masqueradeSrcCIDRs: [10.0.0.0/8]\nextra: 1\nextra: 1", long, cases.Modes()[1:], config.Error,
			"unknownKey,duplicateKey,unknownKey,kernel", nil, "",
		},
		{"", long, cases.Modes()[1:], config.Note, "emptyFile", []string{long}, "-SRC"},
	} {
		for _, mode := range tt.modes {
			t.Run(fmt.Sprintf("%s, %.40q", mode, tt.file), func(t *testing.T) {
				o := nft.Options{Layout: layouts.Of(mode, cmp.Or(tt.chain, "X"))}
				b := nft.Build(config.Defaults{}, o, config.Source{Name: "f", Data: []byte(tt.file)})
				var ids []string
				for _, p := range b.Problems {
					ids = append(ids, p.ID)
				}
				level, got := b.Problems.Worst(), strings.Join(ids, ",")
				if got != tt.ids || level != tt.level || (b.Ruleset == nil) != (tt.has == nil) {
					t.Fatalf("%s: %s, ruleset %v", level, got, b.Ruleset)
				}
				if b.Ruleset == nil {
					return
				}
				text := b.Ruleset.String()
				for _, part := range tt.has {
					if !strings.Contains(text, part) {
						t.Errorf("no %s in\n%s", part, text)
					}
				}
				if tt.lacks != "" && strings.Contains(text, tt.lacks) {
					t.Errorf("%s in\n%s", tt.lacks, text)
				}
			})
		}
	}
}
