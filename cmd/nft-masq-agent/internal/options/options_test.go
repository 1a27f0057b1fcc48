package options_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft/nfttest"
)

var update = flag.Bool("update", false, "regenerate testdata/lines.txt")

// testdata/lines.txt has command lines, most of them of older agents, and what they mean.
func TestCommandLinesOfOlderAgentsKeepTheirMeaning(t *testing.T) {
	nfttest.Golden(t, "testdata/lines.txt", *update, func(t *testing.T, _, line string) string {
		fs := flag.NewFlagSet("run", flag.ContinueOnError)
		o := options.AddRunFlags(fs)
		if err := fs.Parse(strings.Fields(line)); err != nil {
			t.Fatal(err)
		}
		n := o.NFT()
		said := fmt.Sprintf("mode %s, chain %s, random %t, ports %v, marks %+v, %+v\n", n.Layout.Mode(), o.Chain,
			n.RandomFully, n.Ports, n.Marks, o.Defaults)
		said += fmt.Sprintf("config %s, pods %v, verbosity %d, ignored log file %q\n", o.ConfigPath, o.PodCIDRs, o.Verbosity,
			o.IgnoredLogFile())
		return line + nfttest.Marked(said+strings.Join(options.Warnings(fs), "\n"))
	})
}
