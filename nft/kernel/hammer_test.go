package kernel

import (
	"net/netip"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
)

// hammerTargets are exempt or masqueraded in both rulesets of halves.
func hammerTargets(protos ...nfttest.Proto) []nfttest.Target {
	var all []nfttest.Target
	for _, proto := range protos {
		for _, t := range []struct {
			dst         string
			masqueraded bool
		}{{"10.9.0.9", false}, {"198.51.100.1", true}, {"fd00:9::9", false}, {"2001:db8:1::1", true}} {
			all = append(all, nfttest.Target{Proto: proto, Dst: netip.MustParseAddr(t.dst), Masqueraded: t.masqueraded})
		}
	}
	return all
}

// halves returns two configs with the same verdicts and no common set: a wide
// CIDR of each family, and its halves, next to a number of others.
func halves(others int) (whole, halved config.Config) {
	whole = config.Config{MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true}
	for i := range others {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 7), byte(i << 1), 0}), 24)
		whole.NonMasqueradeCIDRs = append(whole.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
	}
	halved = whole
	whole.NonMasqueradeCIDRs = append(cases.CIDRs("10.0.0.0/8", "fd00::/8"), whole.NonMasqueradeCIDRs...)
	halved.NonMasqueradeCIDRs = append(cases.CIDRs("10.0.0.0/9", "10.128.0.0/9", "fd00::/9", "fd80::/9"),
		halved.NonMasqueradeCIDRs...)
	return whole, halved
}

func TestReloadsCauseNoWrongSource(t *testing.T) {
	t.Parallel()
	whole, halved := halves(20)
	policies := halved
	policies.MasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16", "fd00:10::/32")
	policies.NonMasqueradeSrcCIDRs = cases.CIDRs("203.0.113.0/24", "2001:db8:77::/48")
	policies.ForceMasqueradeCIDRs = cases.CIDRs("198.51.100.0/24", "2001:db8:1::/48")
	nf := func(c config.Config, ports ...nft.PortRange) nft.Ruleset {
		return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true, Ports: ports})
	}
	ports := nft.PortRange{Min: 1024, Max: 65535}
	tests := []struct {
		name     string
		reloads  int
		rulesets []nft.Ruleset
	}{
		{"policies", 200, []nft.Ruleset{nf(whole), nf(policies), nf(halved, ports), nf(policies, ports)}},
		{"iptables-nft", 100, []nft.Ruleset{xtOf(whole), xtOf(halved), xtOf(policies)}},
		{"halves", 200, []nft.Ruleset{nf(whole), nf(halved)}},
		{"both modes", 100, []nft.Ruleset{nf(whole), xtOf(halved), nf(policies), xtOf(whole)}},
	}
	for _, tt := range tests[:nfttest.Rounds(2, len(tests), len(tests))] {
		t.Run(tt.name, func(t *testing.T) {
			top := nfttest.NewTopology(t)
			k := open(t, top.Node)
			apply(t, k, tt.rulesets[0], layout.Ours)
			h := nfttest.StartHammer(t, top, hammerTargets(nfttest.UDP, nfttest.TCP)...)
			for i := range nfttest.Rounds(tt.reloads/20, tt.reloads, tt.reloads*25) {
				// The other mode's rules are read when the mode changes.
				if diffs := apply(t, k, tt.rulesets[(i+1)%len(tt.rulesets)],
					map[bool]layout.Depth{true: layout.Everything}[tt.name == "both modes"]); len(diffs) == 0 {
					t.Fatalf("reload %d did nothing", i)
				}
			}
			settled(t, h)
		})
	}
}

// settled waits for some more flows, so that each target was seen, and checks that
// no source was wrong.
func settled(t *testing.T, h *nfttest.Hammer) nfttest.Tally {
	t.Helper()
	wait(t, h, 100)
	tally, err := h.Stop()
	if err != nil {
		t.Fatal(err)
	}
	if err := tally.Err(); err != nil {
		t.Error(err)
	}
	t.Log(tally)
	return tally
}

func TestFirstInstallationCausesNoWrongSource(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	many, _ := halves(2000)
	some, _ := halves(100)
	for _, tt := range []struct {
		nft.Ruleset
		installations int
	}{
		{nft.Compile(many, nft.Options{Layout: native.Layout{}}), 30},
		{xtOf(some), 10},
	} {
		t.Run(string(tt.Mode()), func(t *testing.T) {
			top := nfttest.NewTopology(t)
			k := open(t, top.Node)
			// Masqueraded targets are wrong while nothing is installed.
			h := nfttest.StartHammer(t, top, hammerTargets(nfttest.UDP)[0], hammerTargets(nfttest.UDP)[2])
			for range nfttest.Rounds(tt.installations/10, tt.installations, tt.installations*20) {
				apply(t, k, tt.Ruleset, layout.Ours)
				if _, err := k.Cleanup(t.Context(), Ours); err != nil {
					t.Fatal(err)
				}
			}
			settled(t, h)
		})
	}
}

// TestHammerDetectsATableReplacedInOneTransaction is the control of the tests
// above: it detects wrong sources with the obvious method, so their absence with
// the other method is meaningful.
func TestHammerDetectsATableReplacedInOneTransaction(t *testing.T) {
	nfttest.SkipIfShort(t)
	whole, halved := halves(2000)
	top := nfttest.NewTopology(t)
	c := connect(t, top.Node)
	rulesets := []nft.Ruleset{
		nft.Compile(whole, nft.Options{Layout: native.Layout{}}),
		nft.Compile(halved, nft.Options{Layout: native.Layout{}}),
	}
	apply(t, New(c, rule.String), rulesets[0], layout.Ours)
	h := nfttest.StartHammer(t, top, hammerTargets(nfttest.UDP)...)
	replaced := 0
	for ; replaced < 1000 && h.SoFar().Leaked()+h.SoFar().Wronged() == 0; replaced++ {
		if err := c.Commit(replacement(rulesets[replaced%2].Tables[0]), 0); err != nil {
			t.Fatal(err)
		}
	}
	tally, err := h.Stop()
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case tally.Leaked()+tally.Wronged() > 0:
		t.Logf("replaced %d times: %s", replaced, tally)
	case nfttest.KernelBefore(t, 6, 18):
		t.Logf("not distinguishable on this kernel: replaced %d times: %s", replaced, tally)
	default:
		t.Errorf("replaced %d times and nothing wrong was seen: %s", replaced, tally)
	}
}

// replacement replaces the whole table in one transaction.
func replacement(table nft.Table) *nfnetlink.Batch {
	b := &nfnetlink.Batch{}
	b.AddTable(table.Family, table.Name)
	b.DelTable(table.Family, table.Name)
	b.AddTable(table.Family, table.Name)
	for _, name := range table.Counters {
		b.AddCounter(table.Family, table.Name, name)
	}
	for _, s := range table.Sets {
		b.AddSet(s.KernelSet(table, s.Name+nft.SideA))
		b.AddElements(table.Family, table.Name, s.Name+nft.SideA, s.Prefixes)
	}
	for _, ch := range table.Chains {
		b.AddChain(ch.KernelChain(table))
		for _, r := range ch.Bytecode(table, nil) {
			b.AddRule(r)
		}
	}
	return b
}
