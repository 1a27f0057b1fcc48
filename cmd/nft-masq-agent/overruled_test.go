package main

import (
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

func TestRulesThatOverrodeTheOlderAgentAreReported(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft", "iptables-nft-restore", "iptables-nft-save")
	const accepted, snatted, snat = "198.51.100.9", "198.18.7.9", "192.0.2.77"
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		top := nfttest.NewTopology(t)
		n, older := nodeIn(t, top.Node), loadOlder(t, "ip-masq-agent-v2.9")
		n.swap(older.config)
		older.install(n)
		iptables := func(words string) {
			t.Helper()
			nfttest.Run(t, n.NS, "", "iptables-nft", strings.Fields("-t nat "+words)...)
		}
		iptables("-I POSTROUTING -d 198.51.100.0/24 -j ACCEPT")
		iptables("-A POSTROUTING -d 198.18.7.0/24 -j SNAT --to-source " + snat)
		pod, node := top.PodV4.String(), top.NodeV4.String()
		sees := func(when string, want map[string]string) {
			t.Helper()
			for dst, source := range want {
				s, err := top.Send(nfttest.Flow{
					Proto: nfttest.UDP, From: top.Pod,
					Dst: netip.AddrPortFrom(netip.MustParseAddr(dst), 5000),
				})
				if err != nil || s.Seen.Addr().String() != source {
					t.Errorf("%s: %s sees %s, want %s: %v", when, dst, s.Seen, source, err)
				}
			}
		}
		sees("under the older agent", map[string]string{accepted: pod, snatted: node})
		d := n.start(flag, "--takeover", "--http-address", httpAddress)
		d.applied("start", wants(t, older.config, flag))
		line := d.await("foreign_exemption")
		is := map[nft.Mode]struct {
			accepted, snatted string
			why, translating  string
		}{
			nft.ModeNFTables: {
				node, snat, pod + " → 198.51.100.2 is accepted, which no longer exempts it: see nonMasqueradeCIDRs",
				"1",
			},
			nft.ModeIPTables: {
				pod, node,
				pod + " → 198.51.100.2 is accepted before the jump to this agent's chain, so it is not masqueraded", "0",
			},
		}[mode]
		if line["event"] != "foreign_exemption" || line["why"] != is.why {
			t.Errorf("logged: %v", line)
		}
		why := []string{is.why}
		if mode == nft.ModeNFTables {
			line := d.await("foreign_translation")
			why = append(why, pod+" → 198.18.7.2 is translated to 192.0.2.77, so this agent does not masquerade it")
			if line["event"] != "foreign_translation" || line["why"] != why[1] {
				t.Errorf("logged: %v", line)
			}
		}
		sees("after the take-over", map[string]string{accepted: is.accepted, snatted: is.snatted})
		d.until("the metrics", func() bool {
			return n.metric("nft_masq_agent_other_exempting_rules") == "1" &&
				n.metric("nft_masq_agent_other_translating_rules") == is.translating
		})
		text := unwrap(n.run("status", flag).stdout)
		for _, want := range why {
			if !strings.Contains(text, want) {
				t.Errorf("status: %q is not in %s", want, text)
			}
		}
		if mode == nft.ModeNFTables {
			text := older.config + "- 198.51.100.0/24\n"
			n.swap(text)
			d.applied("config", wants(t, text, flag))
			sees("with the CIDR in the config", map[string]string{accepted: pod})
		}
	})
}
