package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// The addresses to which connections are opened: two that must see the node's
// address and two that must see the pod's, with either list.
var (
	masqueraded = []string{"198.51.100.1", "2001:db8:1::1"}
	exempt      = []string{"10.9.0.9", "fd00:9::9"}
)

func targets() []nfttest.Target {
	return nfttest.Targets(func(a netip.Addr) bool { return slices.Contains(masqueraded, a.String()) },
		slices.Concat(masqueraded, exempt)...)
}

// lists returns two lists of about n CIDRs that decide alike for the targets but
// share no CIDR: an update from one to the other replaces every element, so that
// a concurrent lookup of a target finds a prefix that is being added or deleted.
func lists(n int) [2][]netip.Prefix {
	var both [2][]netip.Prefix
	for i, texts := range [2][]string{
		{"10.0.0.0/8", "fd00::/8", "198.51.100.0/32", "2001:db8:1::/128"},
		{"10.0.0.0/9", "10.128.0.0/9", "fd00::/9", "fd80::/9", "198.51.100.2/31", "2001:db8:1::2/127"},
	} {
		for _, text := range texts {
			both[i] = append(both[i], netip.MustParsePrefix(text))
		}
		for j := 0; len(both[i]) < n; j++ {
			both[i] = append(both[i], filler(i, j))
		}
	}
	return both
}

// filler returns CIDRs without targets, alternating between the families.
func filler(list, i int) netip.Prefix {
	second, hi, lo := byte(list), byte(i>>9), byte(i>>1)
	if i%2 == 0 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{20 + second, hi, lo, 0}), 24)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0x80 + second, 0, hi, lo}), 64)
}

// A policy is one list as the agent's config, and the resulting ruleset.
type policy struct {
	text    []byte
	ruleset map[nft.Mode]nft.Ruleset
}

const chain = "IP-MASQ-AGENT"

// policies returns the two lists as configs, both with the same additional keys.
func policies(n int, keys ...string) [2]policy {
	return policiesWith(n, [2][]string{keys, keys})
}

// policiesWith returns the two lists as configs, each with additional keys of its own.
func policiesWith(n int, keys [2][]string) (both [2]policy) {
	for i, list := range lists(n) {
		var b strings.Builder
		b.WriteString("masqLinkLocal: true\nmasqLinkLocalIPv6: true\nnonMasqueradeCIDRs:\n")
		for _, p := range list {
			fmt.Fprintf(&b, "- %q\n", p)
		}
		for _, key := range keys[i] {
			b.WriteString(key + "\n")
		}
		source := config.Source{Name: "stress", Data: []byte(b.String())}
		c, problems := config.Parse(config.Defaults{EnableIPv6: true}, source)
		nfttest.Check(problems.Err())
		both[i] = policy{text: []byte(b.String()), ruleset: map[nft.Mode]nft.Ruleset{
			nft.ModeNFTables: nft.Compile(c,
				nft.Options{
					Layout: native.Layout{}, RandomFully: true,
					Marks: []nft.Mark{{Value: 0x4000, Mask: 0x4000}, {Value: 0x2000, Mask: 0x2000}},
				}).WithAddresses(cases.Addrs(floating...)),
			nft.ModeIPTables: nft.Compile(c, nft.Options{Layout: xtables.Layout{ChainName: chain}}),
		}}
	}
	return both
}
