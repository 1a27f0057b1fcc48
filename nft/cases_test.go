package nft_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest/cases"
)

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
			if diff := cmp.Diff(c.File(t, golden[m]), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", golden[m], diff)
			}
		}
	})
}
