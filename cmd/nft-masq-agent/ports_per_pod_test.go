package main

import (
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// A pod that opens ten times its block fails alone, and is named.
func TestFullBlockOfPortsConcernsOnlyItsPod(t *testing.T) {
	t.Parallel()
	for _, family := range []struct{ sources, node, pod, other, dst string }{
		{"10.244.0.0/16", "192.0.2.1", "10.244.1.2", "10.244.1.3", "203.0.113.9:5001"},
		{"'fd00:10:244::/48'", "2001:db8::1", "fd00:10:244:1::2", "fd00:10:244:1::3", "[2001:db8:77::9]:5001"},
	} {
		t.Run(family.pod, func(t *testing.T) {
			t.Parallel()
			const size = 16 // of four blocks from 20000 on; 20064 to 20095 are the node's
			n := newTrafficNode(t)
			n.enforce("enableIPv6: true\nmasqueradeSrcCIDRs: [" + family.sources + "]\nportsPerPod: 16\ntoPorts: 20000-20095\n")
			to := netip.MustParseAddrPort(family.dst)
			other := netip.MustParseAddr(family.other)
			send := func(from netip.Addr) nfttest.Sighting {
				t.Helper()
				*n.port++
				return nfttest.MustSend(t, n.top, nfttest.Flow{
					Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: to,
					Src: netip.AddrPortFrom(from, 30_000+*n.port),
				})
			}
			seen := map[uint16]bool{}
			for range size {
				s := send(netip.MustParseAddr(family.pod))
				if port := s.Seen.Port(); port < 20032 || port > 20047 || seen[port] {
					t.Fatalf("seen from %s", s.Seen)
				}
				seen[s.Seen.Port()] = true
			}
			for range 9 * size { // none of them arrives
				c, err := n.top.Pod.DialContext(t.Context(), "udp", family.dst)
				n.check(err)
				_, err = c.Write([]byte("x"))
				n.check(err)
				n.check(c.Close())
			}
			n.check(n.top.AddAddr(n.top.Pod, other)) // now, because IPv6 would choose it as a source
			for range size / 2 {
				if s := send(other); s.Seen.Port() < 20048 || s.Seen.Port() > 20063 {
					t.Errorf("another pod is seen from %s", s.Seen)
				}
			}
			if listed := n.connections(to.Addr().String()); len(listed) != size+size/2 {
				t.Errorf("%d connections", len(listed))
			}
			got := n.run(append([]string{"status"}, *n.flags...)...)
			for _, part := range []string{
				"new udp connections of a pod to " + family.dst + " fail, or will\n", "16 of 16 source ports",
				"raise portsPerPod",
			} {
				if got.code != exitFailed || !strings.Contains(got.stdout, part) {
					t.Errorf("%+v, want %s", got, part)
				}
			}
		})
	}
}

// A connection keeps its port when blocks come, change and go, and none of them is stale.
func TestConnectionsKeepTheirPortWhenBlocksChange(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	const sources = "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	n.enforce(sources)
	first := n.open(nfttest.UDP, "203.0.113.9:53")
	for _, key := range []string{"portsPerPod: 2000\n", "portsPerPod: 250\n", ""} {
		n.enforce(sources + key)
		again := nfttest.MustSend(t, n.top, nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Src: first.Sent,
			Dst: netip.MustParseAddrPort("203.0.113.9:53"),
		})
		if again.Seen != first.Seen {
			t.Errorf("%q: seen from %s, then from %s", key, first.Seen, again.Seen)
		}
		n.open(nfttest.UDP, "203.0.113.9:54")
		if stale := n.connections("--stale"); len(stale) > 0 {
			t.Errorf("%q: %+v", key, stale)
		}
	}
}
