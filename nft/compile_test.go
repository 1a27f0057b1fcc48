package nft_test

import (
	"fmt"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layouts"
)

func TestManyCIDRsInModeIPTablesCauseAWarning(t *testing.T) {
	for _, n := range []int{999, 1000} {
		file := "nonMasqueradeCIDRs:\n"
		for i := range n {
			file += fmt.Sprintf("- 10.%d.%d.0/24\n", i>>8, i&0xff)
		}
		for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} {
			b, err := nft.Build(config.Defaults{}, nft.Options{Layout: layouts.Of(mode, "X")}, config.Source{Name: "f", Data: []byte(file)})
			if err != nil || (len(b.Warnings) == 1) != (n == 1000 && mode == nft.ModeIPTables) {
				t.Errorf("%d CIDRs, %s: %v, %v", n, mode, b.Warnings, err)
			}
		}
	}
}
