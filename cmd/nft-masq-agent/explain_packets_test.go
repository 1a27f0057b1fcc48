package main

import (
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft/nfttest"
)

// meetThePod replaces addresses and interfaces in a ruleset with those of the
// pod, so that the rules match it.
func meetThePod(r *rand.Rand, rules string) string {
	for from, to := range map[string][]string{
		"192.168.122.0/24": {"10.244.1.0/24"}, "172.17.0.0/16": {"10.244.0.0/16"}, "10.88.0.5": {"10.244.1.2"},
		"192.168.1.1": {"10.244.1.2"},
		"fd00:88::5":  {"fd00:10:244:1::2"}, "docker0": {"eth0", "pod0"},
		"vlan+":            {"eth+", "e+"},
		"0x40000/0xff0000": {"0x0/0xff0000"}, "10.96.0.10": {"10.96.0.10", "203.0.113.9"},
	} {
		if r.IntN(2) == 0 {
			rules = strings.ReplaceAll(rules, from, to[r.IntN(len(to))])
		}
	}
	return rules
}

// With any rules of other programs, the headline claims no other address than the far
// end sees, before a connection shows it and afterwards.
func TestHeadlineIsWhatTheFarEndSees(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	dirs, err := filepath.Glob("../../testdata/foreign/*")
	if err != nil || len(dirs) == 0 {
		t.Fatal("no cases", err)
	}
	packets := nfttest.Rounds(10, 60, 1000)
	r := rand.New(rand.NewPCG(*seed, 19))
	n := newTrafficNode(t)
	configs := []string{
		"", "nonMasqueradeCIDRs: []\n",
		"nonMasqueradeCIDRs: [203.0.113.0/24, 10.9.0.0/16, '2001:db8:77::/48']\n",
		"nonMasqueradeCIDRs: [203.0.113.0/24, 10.9.0.0/16, '2001:db8:77::/48']\nenableIPv6: true\n",
		"enableIPv6: true\nforceMasqueradeCIDRs: [10.9.0.0/16]\n", "masqueradeSrcCIDRs: [10.244.1.0/24]\n",
		"nonMasqueradeSrcCIDRs: [10.244.1.2/32]\n",
	}
	dsts := []string{
		"10.9.0.9", "10.240.7.7", "203.0.113.9", "198.51.100.9", "10.96.0.11", "192.168.122.7",
		"2001:db8:77::8", "fd00:88::9", "10.1.1.5",
	}
	codes := map[answer.Code]int{}
	for sent := 0; sent < packets; {
		n.flush()
		dir, config := dirs[r.IntN(len(dirs))], configs[r.IntN(len(configs))]
		mode := "--mode=nftables"
		if r.IntN(2) == 0 { // the first configs have no key of this agent alone
			mode = "--mode=iptables-nft"
			config = configs[r.IntN(3)]
		}
		first := r.IntN(2) == 0
		if first {
			n.enforce(config, mode)
		}
		nfttest.LoadForeign(t, n.top.Node, dir, func(rules string) string { return meetThePod(r, rules) })
		n.enforce(config, mode)
		for range 5 {
			dst := netip.MustParseAddr(dsts[r.IntN(len(dsts))])
			src := n.top.PodV4
			if dst.Is6() {
				src = n.top.PodV6
			}
			var x answer.Explanation
			to := netip.AddrPortFrom(dst, uint16(2000+sent))
			args := []string{
				"explain", to.String(), "--from", src.String(), "--config", n.path, mode,
			}
			n.here(&x, args...)
			seen := n.sends(nfttest.UDP, src, to)
			n.judge(x, seen)
			x = answer.Explanation{}
			n.here(&x, args...)
			codes[x.Why.Code]++
			sent++
			n.judge(x, seen)
			if t.Failed() {
				t.Fatalf("seed %d: %s, %s, ours first %t, %s to %s with the config %s", *seed, filepath.Base(dir), mode, first, src,
					dst, config)
			}
		}
	}
	t.Log(codes)
}
