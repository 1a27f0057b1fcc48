package nfttest_test

import (
	"net/netip"
	"strings"
	"testing"

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
	for _, pod := range []string{"10.244.7.7", "fd00:10:244:7::7"} {
		nfttest.NoError(t, top.AddAddr(top.Pod, netip.MustParseAddr(pod)))
	}
	if err := top.AddAddr(top.Outside, top.PodV4); err == nil {
		t.Error("the outside host got the pod's address")
	}
	pod, node := top.Pod, top.Node
	for _, tt := range []struct {
		from           *nfttest.NS
		src, dst, want string
		dev            string
	}{
		{pod, "10.244.1.2", "198.51.100.1", "192.0.2.1", ""},
		{pod, "10.244.1.2", "198.51.100.4", "192.0.2.1", ""}, // no host has it: assigned to the outside host by Send
		{pod, "10.244.1.2", "10.9.0.9", "10.244.1.2", ""},
		{pod, "10.244.1.2", "192.0.2.1", "10.244.1.2", ""},
		{pod, "10.244.1.2", "10.244.1.1", "10.244.1.2", ""},
		{pod, "10.244.7.7", "198.51.100.1", "192.0.2.1", ""},
		{pod, "10.244.7.7", "10.9.0.9", "10.244.7.7", ""},
		{pod, "fd00:10:244:1::2", "2001:db8:77::1", "2001:db8::1", ""},
		{pod, "fd00:10:244:1::2", "2001:db8::1", "fd00:10:244:1::2", ""},
		{pod, "fd00:10:244:7::7", "fd00:9::9", "fd00:10:244:7::7", ""},
		{node, "10.244.1.1", "198.51.100.1", "192.0.2.1", ""},
		{node, "10.244.1.1", "10.9.0.9", "10.244.1.1", ""},
		{node, "10.244.1.1", "224.0.0.251", "192.0.2.1", "eth0"},
		{node, "10.244.1.1", "255.255.255.255", "192.0.2.1", "eth0"},
		{node, "127.0.0.1", "127.0.0.1", "127.0.0.1", ""},
		{node, "192.0.2.1", "10.244.1.2", "192.0.2.1", ""},
		{node, "fd00:10:244:1::1", "2001:db8:1::1", "2001:db8::1", ""},
		{node, "fd00:10:244:1::1", "ff0e::1", "2001:db8::1", "eth0"},
		{node, "::1", "::1", "::1", ""},
		{node, "fe80::1%eth0", "fe80::99%eth0", "fe80::1", ""},
	} {
		src, dst := netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst)
		for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP, nfttest.SCTP, nfttest.ICMP} {
			if proto != nfttest.UDP && (tt.dev != "" || src.IsLoopback()) {
				continue
			}
			got := nfttest.MustSend(t, top, nfttest.Flow{
				Proto: proto, From: tt.from, Dev: tt.dev,
				Src: netip.AddrPortFrom(src, 4000), Dst: netip.AddrPortFrom(dst, 5000),
			})
			masqueraded := tt.want != src.WithZone("").String()
			if got.Sent != netip.AddrPortFrom(src.WithZone(""), 4000) || got.Seen.Addr().String() != tt.want ||
				got.Masqueraded() != masqueraded {
				t.Errorf("%s from %s to %s: sent from %s, seen from %s, want %s", proto, src, dst, got.Sent, got.Seen, tt.want)
			}
		}
	}
}

// An answer belongs to the connection, also where both ends are in one namespace.
func TestPacketsAreAnswered(t *testing.T) {
	nfttest.Require(t, "nft", "conntrack")
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, masqueradeBut, "-f", "-")
	for _, flow := range []nfttest.Flow{
		{From: top.Pod, Dst: netip.MustParseAddrPort("198.51.100.1:5001")},
		{From: top.Pod, Dst: netip.MustParseAddrPort("10.9.0.9:5002")},
		{From: top.Node, Dst: netip.MustParseAddrPort("192.0.2.1:5003")},
	} {
		flow.Proto = nfttest.UDP
		flow.Answered = true
		nfttest.MustSend(t, top, flow)
	}
	if got := nfttest.Run(t, top.Node, "", "conntrack", "-L"); strings.Contains(got, "UNREPLIED") {
		t.Error(got)
	}
}
