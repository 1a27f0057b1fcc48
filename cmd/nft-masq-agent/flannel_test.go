package main

import (
	"regexp"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

func TestCommandsForRulesThatFlannelLeavesDeleteThem(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	iptables := readDocument(t, "testdata/foreign/flannel-iptables/rules.iptables")
	nfttest.Run(t, n.NS, iptables, "iptables-nft-restore")
	nfttest.Run(t, n.NS, strings.NewReplacer(
		"10.244.0.0/16", "fd00:10:244::/56", "10.244.1.0/24", "fd00:10:244:1::/64", "224.0.0.0/4", "ff00::/8",
	).Replace(iptables), "ip6tables-nft-restore")
	nfttest.NFT(t, n.NS, "", "-f", root+"/testdata/foreign/flannel-nftables/rules.nft")
	const each = 8 // two masquerades of each family and backend
	masquerades := func() (found int) {
		for _, table := range []string{"ip flannel-ipv4", "ip6 flannel-ipv6"} {
			listed := nfttest.NFT(t, n.NS, "", append([]string{"list", "table"}, strings.Fields(table)...)...)
			found += strings.Count(listed, "masquerade")
		}
		for _, save := range []string{"iptables-nft-save", "ip6tables-nft-save"} {
			found += strings.Count(nfttest.Run(t, n.NS, "", save, "-t", "nat"), "-j MASQUERADE")
		}
		return found
	}
	if got := masquerades(); got != each {
		t.Fatalf("%d rules masquerade, want %d", got, each)
	}
	_, text, _ := strings.Cut(readDocument(t, "manifests/README.md"), "\n## Rules that flannel leaves\n")
	text, _, _ = strings.Cut(text, "\n## ")
	for _, m := range regexp.MustCompile("`((?:nft|ip6?tables) [^`]+)`").FindAllStringSubmatch(text, -1) {
		args := strings.Fields(m[1])
		if args[0] != "nft" {
			args[0] += "-nft"
		}
		nfttest.Run(t, n.NS, "", args[0], args[1:]...)
	}
	if got := masquerades(); got != 0 {
		t.Errorf("after the commands of the documents %d rules masquerade, want none", got)
	}
}
