package kernel

import (
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// halves returns two configs with the same verdicts and no common set: a wide
// CIDR of each family, and its halves.
func halves() (whole, halved config.Config) {
	whole = config.Config{MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true}
	halved = whole
	whole.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8", "fd00::/8")
	halved.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/9", "10.128.0.0/9", "fd00::/9", "fd80::/9")
	return whole, halved
}

func TestReloadsCauseNoWrongSource(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	whole, halved := halves()
	policies := halved
	policies.MasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16", "fd00:10::/32")
	policies.NonMasqueradeSrcCIDRs = cases.CIDRs("203.0.113.0/24", "2001:db8:77::/48")
	policies.ForceMasqueradeCIDRs = cases.CIDRs("198.51.100.0/24", "2001:db8:1::/48")
	nf := func(c config.Config, ports ...nft.PortRange) nft.Ruleset {
		return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true, Ports: ports})
	}
	ports := nft.PortRange{Min: 1024, Max: 65535}
	layout := xtables.Layout{ChainName: cases.DefaultChain}
	xtPorts := nft.Compile(whole, nft.Options{Layout: layout, Ports: []nft.PortRange{ports}})
	tests := []struct {
		name     string
		reloads  int
		rulesets []nft.Ruleset
	}{
		{"policies", 200, []nft.Ruleset{nf(whole), nf(policies), nf(halved, ports), nf(policies, ports)}},
		{"iptables-nft", 100, []nft.Ruleset{xtOf(whole), xtOf(halved), xtPorts}},
		{"halves", 200, []nft.Ruleset{nf(whole), nf(halved)}},
		{"both modes", 100, []nft.Ruleset{nf(whole), xtOf(halved), nf(policies), xtOf(whole)}},
	}
	for _, tt := range tests[:nfttest.Rounds(2, len(tests), len(tests))] {
		t.Run(tt.name, func(t *testing.T) {
			top := nfttest.NewTopology(t)
			k := open(t, top.Node)
			apply(t, k, tt.rulesets[0], nft.Contents)
			h := nfttest.StartHammer(t, top, nfttest.TargetsOfBothKinds()...)
			for i := range nfttest.Rounds(tt.reloads/20, tt.reloads/4, tt.reloads*25) {
				// The other mode's rules are read when the mode changes.
				if diffs := apply(t, k, tt.rulesets[(i+1)%len(tt.rulesets)],
					map[bool]nft.Depth{true: nft.WithLeftovers, false: nft.Contents}[tt.name == "both modes"]); len(diffs) == 0 {
					t.Fatalf("reload %d did nothing", i)
				}
			}
			settled(t, h)
		})
	}
}

// settled waits for some more flows, so that each target was seen, and checks that
// no source was wrong.
func settled(t *testing.T, h *nfttest.Hammer) {
	t.Helper()
	wait(t, h, 100)
	tally, err := h.Stop()
	nfttest.NoError(t, err)
	if err := tally.Err(); err != nil {
		t.Error(err)
	}
	t.Log(tally)
}
