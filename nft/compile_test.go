package nft_test

import (
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layouts"
)

// list returns a key with n networks of a family.
func list(key string, ipv6 bool, n int) string {
	var b strings.Builder
	b.WriteString(key + ":\n")
	for i := range n {
		if ipv6 {
			fmt.Fprintf(&b, "- \"fd00:%x::/32\"\n", i)
		} else {
			fmt.Fprintf(&b, "- 10.%d.%d.0/24\n", i>>8, i&0xff)
		}
	}
	return b.String()
}

func TestModeIPTablesTakesAThousandCIDRsOfAFamily(t *testing.T) {
	const exempt, force, sources = config.KeyNonMasqueradeCIDRs, config.KeyForceMasqueradeCIDRs, config.KeyMasqueradeSrcCIDRs
	for _, tt := range []struct {
		file  string
		wrong string // in mode iptables-nft
	}{
		{list(exempt, false, 1000), ""},
		{list(exempt, false, 1000) + strings.TrimPrefix(list("", true, 1000), ":\n"), ""},
		{list(exempt, false, 1001), "f:1002:3: 1001 IPv4 CIDRs, mode iptables-nft takes at most 1000: use mode nftables"},
		{list(exempt, true, 1001), "f:1002:3: 1001 IPv6 CIDRs, mode iptables-nft takes at most 1000: use mode nftables"},
		{
			list(exempt, false, 600) + list(force, false, 401),
			"f:601:3: 1001 IPv4 CIDRs, mode iptables-nft takes at most 1000: use mode nftables",
		},
		{list(exempt, false, 600) + list(sources, false, 400), ""},
	} {
		for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} {
			o := nft.Options{Layout: layouts.Of(mode, "X")}
			_, err := nft.Build(config.Defaults{}, o, config.Source{Name: "f", Data: []byte(tt.file)})
			wrong := ""
			if mode == nft.ModeIPTables {
				wrong = tt.wrong
			}
			if got := fmt.Sprint(err); got != wrong && (err != nil || wrong != "") {
				t.Errorf("%.30q, %s: %s, want %q", tt.file, mode, got, wrong)
			}
		}
	}
}
