package nfttest_test

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// masqueradeBut exempts 10.0.0.0/8 and fd00::/8.
const masqueradeBut = `
table inet test {
	chain postrouting {
		type nat hook postrouting priority srcnat + 10
		fib daddr type local return
		ip daddr 10.0.0.0/8 return
		ip6 daddr fd00::/8 return
		masquerade
	}
}
`

func TestFarEndSeesSourceAccordingToRules(t *testing.T) {
	nfttest.Require(t, "nft")
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, masqueradeBut, "-f", "-")
	for _, tt := range []struct {
		dst  string
		want netip.Addr
	}{
		{"198.51.100.1", top.NodeV4},
		{"198.51.100.4", top.NodeV4}, // no host has it: assigned to the outside host by Send
		{"192.0.2.77", top.NodeV4},
		{"10.9.0.9", top.PodV4},
		{"10.244.1.77", top.PodV4},
		{"192.0.2.1", top.PodV4},
		{"10.244.1.1", top.PodV4},
		{"2001:db8:1::1", top.NodeV6},
		{"2001:db8:77::1", top.NodeV6},
		{"fd00:9::9", top.PodV6},
		{"2001:db8::1", top.PodV6},
		{"fd00:10:244:1::1", top.PodV6},
	} {
		for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP, nfttest.SCTP, nfttest.ICMP} {
			dst := netip.AddrPortFrom(netip.MustParseAddr(tt.dst), 5000)
			got := nfttest.MustSend(t, top, nfttest.Flow{Proto: proto, From: top.Pod, Dst: dst})
			if got.Seen.Addr() != tt.want {
				t.Errorf("%s to %s: seen from %s, want %s", proto, dst, got.Seen, tt.want)
			}
			if got.Masqueraded() != (tt.want == top.NodeV4 || tt.want == top.NodeV6) {
				t.Errorf("%s to %s: sent from %s, seen from %s, masqueraded %v",
					proto, dst, got.Sent, got.Seen, got.Masqueraded())
			}
		}
	}
}

func TestTrafficOfTheNodeAndOfMorePodsIsSeen(t *testing.T) {
	nfttest.Require(t, "nft")
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, masqueradeBut, "-f", "-")
	for _, pod := range []string{"10.244.7.7", "fd00:10:244:7::7"} {
		if err := top.AddAddr(top.Pod, netip.MustParseAddr(pod)); err != nil {
			t.Fatal(err)
		}
	}
	if err := top.AddAddr(top.Outside, top.PodV4); err == nil {
		t.Error("the outside host got the pod's address")
	}
	for _, tt := range []struct {
		from           *nfttest.NS
		proto          nfttest.Proto
		src, dst, want string
		dev            string
	}{
		{top.Node, nfttest.UDP, "10.244.1.1", "198.51.100.1", "192.0.2.1", ""},
		{top.Node, nfttest.TCP, "10.244.1.1", "198.51.100.1", "192.0.2.1", ""},
		{top.Node, nfttest.SCTP, "10.244.1.1", "198.51.100.1", "192.0.2.1", ""},
		{top.Node, nfttest.UDP, "10.244.1.1", "10.9.0.9", "10.244.1.1", ""},
		{top.Node, nfttest.UDP, "10.244.1.1", "224.0.0.251", "192.0.2.1", "eth0"},
		{top.Node, nfttest.UDP, "10.244.1.1", "192.0.2.255", "192.0.2.1", ""},
		{top.Node, nfttest.UDP, "10.244.1.1", "255.255.255.255", "192.0.2.1", "eth0"},
		{top.Node, nfttest.UDP, "127.0.0.1", "127.0.0.1", "127.0.0.1", ""},
		{top.Node, nfttest.TCP, "127.0.0.1", "127.0.0.1", "127.0.0.1", ""},
		{top.Node, nfttest.UDP, "192.0.2.1", "10.244.1.2", "192.0.2.1", ""},
		{top.Node, nfttest.UDP, "fd00:10:244:1::1", "2001:db8:1::1", "2001:db8::1", ""},
		{top.Node, nfttest.TCP, "fd00:10:244:1::1", "fd00:9::9", "fd00:10:244:1::1", ""},
		{top.Node, nfttest.UDP, "fd00:10:244:1::1", "ff0e::1", "2001:db8::1", "eth0"},
		{top.Node, nfttest.TCP, "::1", "::1", "::1", ""},
		{top.Node, nfttest.UDP, "fe80::1%eth0", "fe80::99%eth0", "fe80::1", ""},
		{top.Node, nfttest.TCP, "fe80::1%eth0", "fe80::99%eth0", "fe80::1", ""},
		{top.Pod, nfttest.TCP, "10.244.7.7", "10.9.0.9", "10.244.7.7", ""},
		{top.Pod, nfttest.TCP, "10.244.7.7", "198.51.100.1", "192.0.2.1", ""},
		{top.Pod, nfttest.TCP, "fd00:10:244:7::7", "fd00:9::9", "fd00:10:244:7::7", ""},
	} {
		src, dst, want := netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst), netip.MustParseAddr(tt.want)
		got := nfttest.MustSend(t, top, nfttest.Flow{
			Proto: tt.proto, From: tt.from, Dev: tt.dev,
			Src: netip.AddrPortFrom(src, 4000), Dst: netip.AddrPortFrom(dst, 5000),
		})
		if got.Sent != netip.AddrPortFrom(src.WithZone(""), 4000) || got.Seen.Addr() != want {
			t.Errorf("%s from %s to %s: sent from %s, seen from %s, want %s", tt.proto, src, dst, got.Sent, got.Seen, want)
		}
	}
}

func TestMasqueradedPortsAreSeen(t *testing.T) {
	nfttest.Require(t, "nft")
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, `table inet test {
		chain postrouting {
			type nat hook postrouting priority srcnat
			meta l4proto { tcp, udp, sctp } masquerade to :40000-40009
		}
	}`, "-f", "-")
	for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP, nfttest.SCTP} {
		got := nfttest.MustSend(t, top, nfttest.Flow{
			Proto: proto, From: top.Pod,
			Src: netip.AddrPortFrom(netip.Addr{}, 3000), Dst: netip.MustParseAddrPort("198.51.100.1:5000"),
		})
		if got.Sent.Port() != 3000 || got.Seen.Port() < 40000 || got.Seen.Port() > 40009 {
			t.Errorf("%s: sent from %s, seen from %s", proto, got.Sent, got.Seen)
		}
	}
}

func TestDroppedPacketsAreNotSeen(t *testing.T) {
	for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
		t.Run(string(proto), func(t *testing.T) {
			t.Parallel()
			nfttest.Require(t, "nft")
			top := nfttest.NewTopology(t)
			nfttest.NFT(t, top.Node, "table inet test { chain forward { type filter hook forward priority filter; drop; }; }",
				"-f", "-")
			_, err := top.Send(nfttest.Flow{
				Proto: proto, From: top.Pod, Dst: netip.MustParseAddrPort("198.51.100.1:5000"),
				Timeout: time.Second / 2,
			})
			if !errors.Is(err, nfttest.ErrNotSeen) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestLoopbackIsSeenWithoutOtherDevices(t *testing.T) {
	n := nfttest.NewNS(t, "lone")
	for _, dst := range []string{"127.0.0.1:5000", "127.9.9.9:5000", "[::1]:5000"} {
		for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
			got, err := nfttest.Send(nfttest.Flow{Proto: proto, From: n, To: n, Dst: netip.MustParseAddrPort(dst)})
			if err != nil {
				t.Fatal(err)
			}
			if got.Sent != got.Seen {
				t.Errorf("%s to %s: sent from %s, seen from %s", proto, dst, got.Sent, got.Seen)
			}
		}
	}
}
