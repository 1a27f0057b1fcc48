package main

import (
	"encoding/json"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
)

func TestDroppedPacketsOfPodsAreCounted(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	const text = "enableIPv6: true\nmasqueradeSrcCIDRs: [10.244.0.0/16, 'fd00:10:244::/48']\ndropInvalid: true\n"
	n.swap(text)
	d := n.start("--http-address", httpAddress, "--resync-interval=3600")
	d.began(wants(t, text))
	for _, family := range []struct {
		name, dst string
		packets   int
	}{{"ipv4", "203.0.113.9", 2}, {"ipv6", "2001:db8:1::1", 1}} {
		to := netip.AddrPortFrom(netip.MustParseAddr(family.dst), 7)
		for range family.packets {
			src := n.top.PodV4
			if to.Addr().Is6() {
				src = n.top.PodV6
			}
			const fin = 1
			f := nfttest.Flow{Proto: nfttest.TCP, Flags: fin, From: n.top.Pod, Src: netip.AddrPortFrom(src, 0), Dst: to}
			n.check(n.top.AddAddr(n.top.Outside, to.Addr()))
			n.check(f.Emit())
		}
		want, reported := strconv.Itoa(family.packets), ""
		for deadline := time.Now().Add(timeout); time.Now().Before(deadline); {
			var status struct {
				Untranslated []struct {
					Family  string
					Packets json.Number
				}
			}
			got := n.run("status", "-o", "json")
			n.check(json.Unmarshal([]byte(got.stdout), &status))
			for _, u := range status.Untranslated {
				if u.Family == family.name {
					reported = u.Packets.String()
				}
			}
			if reported == want {
				break
			}
		}
		if got := n.metric(`nft_masq_agent_untranslated_packets_total{family="` + family.name + `"}`); got != want ||
			reported != want {
			t.Errorf("%s: metric %s, status %s, want %s", family.name, got, reported, want)
		}
	}
	if got := n.run("status"); !strings.Contains(got.stdout,
		"2 packets of pods without a connection, dropped (dropInvalid)") {
		t.Errorf("%+v", got)
	}
}
