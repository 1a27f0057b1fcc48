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

func TestNodesOwnTrafficIsSeen(t *testing.T) {
	nfttest.Require(t, "nft")
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, masqueradeBut, "-f", "-")
	for _, tt := range []struct {
		proto          nfttest.Proto
		src, dst, want string
		dev            string
	}{
		{proto: nfttest.UDP, src: "10.244.1.1", dst: "198.51.100.1", want: "192.0.2.1"},
		{proto: nfttest.TCP, src: "10.244.1.1", dst: "198.51.100.1", want: "192.0.2.1"},
		{proto: nfttest.SCTP, src: "10.244.1.1", dst: "198.51.100.1", want: "192.0.2.1"},
		{proto: nfttest.UDP, src: "10.244.1.1", dst: "10.9.0.9", want: "10.244.1.1"},
		{proto: nfttest.UDP, src: "10.244.1.1", dst: "224.0.0.251", want: "192.0.2.1", dev: "eth0"},
		{proto: nfttest.UDP, src: "10.244.1.1", dst: "192.0.2.255", want: "192.0.2.1"},
		{proto: nfttest.UDP, src: "10.244.1.1", dst: "255.255.255.255", want: "192.0.2.1", dev: "eth0"},
		{proto: nfttest.UDP, src: "127.0.0.1", dst: "127.0.0.1", want: "127.0.0.1"},
		{proto: nfttest.TCP, src: "127.0.0.1", dst: "127.0.0.1", want: "127.0.0.1"},
		{proto: nfttest.UDP, src: "192.0.2.1", dst: "10.244.1.2", want: "192.0.2.1"},
		{proto: nfttest.UDP, src: "fd00:10:244:1::1", dst: "2001:db8:1::1", want: "2001:db8::1"},
		{proto: nfttest.TCP, src: "fd00:10:244:1::1", dst: "fd00:9::9", want: "fd00:10:244:1::1"},
		{proto: nfttest.UDP, src: "fd00:10:244:1::1", dst: "ff0e::1", want: "2001:db8::1", dev: "eth0"},
		{proto: nfttest.TCP, src: "::1", dst: "::1", want: "::1"},
	} {
		src, dst, want := netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst), netip.MustParseAddr(tt.want)
		got := nfttest.MustSend(t, top, nfttest.Flow{
			Proto: tt.proto, From: top.Node, Dev: tt.dev,
			Src: netip.AddrPortFrom(src, 4000), Dst: netip.AddrPortFrom(dst, 5000),
		})
		if got.Sent != netip.AddrPortFrom(src, 4000) || got.Seen.Addr() != want {
			t.Errorf("%s from %s to %s: sent from %s, seen from %s, want %s", tt.proto, src, dst, got.Sent, got.Seen, want)
		}
	}
}

func TestLinkLocalDestinationIsReachedByTheNode(t *testing.T) {
	top := nfttest.NewTopology(t)
	dst := netip.MustParseAddr("fe80::99%eth0")
	for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
		got := nfttest.MustSend(t, top, nfttest.Flow{Proto: proto, From: top.Node, Dst: netip.AddrPortFrom(dst, 5000)})
		if !got.Seen.Addr().IsLinkLocalUnicast() || got.Masqueraded() {
			t.Errorf("%s: sent from %s, seen from %s", proto, got.Sent, got.Seen)
		}
	}
}

func TestPodCanHaveMoreAddresses(t *testing.T) {
	top := nfttest.NewTopology(t)
	for _, s := range []string{"10.244.7.7", "fd00:10:244:7::7"} {
		src := netip.MustParseAddr(s)
		dst := netip.MustParseAddrPort("198.51.100.1:5000")
		if src.Is6() {
			dst = netip.MustParseAddrPort("[2001:db8:1::1]:5000")
		}
		if err := top.AddAddr(top.Pod, src); err != nil {
			t.Fatal(err)
		}
		got := nfttest.MustSend(t, top,
			nfttest.Flow{Proto: nfttest.TCP, From: top.Pod, Src: netip.AddrPortFrom(src, 0), Dst: dst})
		if got.Seen.Addr() != src {
			t.Errorf("sent from %s, seen from %s", src, got.Seen)
		}
	}
	if err := top.AddAddr(top.Outside, top.PodV4); err == nil {
		t.Error("the outside host got the pod's address")
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
