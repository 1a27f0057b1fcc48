package nft_test

import (
	"cmp"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

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
	native, iptables := cases.Modes()[:1], cases.Modes()[1:]
	for _, tt := range []struct {
		file, chain string
		modes       []nft.Mode
		level       config.Level
		ids         string // of the problems
		has         string // in the ruleset; "": there is no ruleset
	}{
		{"", "", cases.Modes(), config.Note, "emptyFile", "192.168.0.0/16"},
		{"masqLinkLocal: true\nextra: 1", "", cases.Modes(), config.Warning, "unknownKey", "10.0.0.0/8"},
		{octal, "", cases.Modes(), config.Mistake, "octalLength,octalLength", "fd00::/8"},
		{"masqLinkLocal: true\n---\n@", "", cases.Modes(), config.Mistake, "secondDocument", "10.0.0.0/8"},
		{"nonMasqueradeCIDRs: [10.0.0.0/08]", "", cases.Modes(), config.Error, "invalidEntry", ""},
		{"masqLinkLocal: 1\nmasqLinklLocal: true", "", cases.Modes(), config.Error, "wrongValue,misspelledKey", ""},
		{"masqueradeHost: false", "", native, config.Note, "", "to this node"},
		{"masqueradeHost: false", "", iptables, config.Error, "needsNFTables", ""},
		{
			"masqueradeHost: false\nx: 1\nx: 1", "", iptables, config.Error,
			"unknownKey,duplicateKey,unknownKey,needsNFTables", "",
		},
		{"masqueradeSrcCIDRs: [10.0.0.0/8]", long, iptables, config.Error, "kernel", ""},
		{
			"masqueradeSrcCIDRs: [10.0.0.0/8]\nx: 1\nx: 1", long, iptables, config.Error,
			"unknownKey,duplicateKey,unknownKey,kernel", "",
		},
		{"", long, iptables, config.Note, "emptyFile", long},
	} {
		for _, mode := range tt.modes {
			o := nft.Options{Layout: layouts.Of(mode, cmp.Or(tt.chain, "X"))}
			b := nft.Build(config.Defaults{}, o, config.Source{Name: "f", Data: []byte(tt.file)})
			var ids []string
			for _, p := range b.Problems {
				ids = append(ids, p.ID)
			}
			level, got := b.Problems.Worst(), strings.Join(ids, ",")
			if got != tt.ids || level != tt.level || (b.Ruleset == nil) != (tt.has == "") ||
				b.Ruleset != nil && !strings.Contains(b.Ruleset.String(), tt.has) {
				t.Errorf("%s, %.40q: %s %s, want %s in ruleset %v", mode, tt.file, level, got, tt.has, b.Ruleset)
			}
		}
	}
}

var update = flag.Bool("update", false, "regenerate the golden files in testdata/cases")

func TestRulesetsMatchTheGoldenFiles(t *testing.T) {
	golden := map[nft.Mode]string{nft.ModeNFTables: "ruleset.nft", nft.ModeIPTables: "iptables.rules"}
	cases.Each(t, func(t *testing.T, c cases.Case) {
		for _, m := range c.Modes() {
			got := c.Compile(m).String()
			if *update {
				if err := os.WriteFile(filepath.Join(c.Dir, golden[m]), []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if diff := gocmp.Diff(c.File(t, golden[m]), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", golden[m], diff)
			}
		}
	})
}
