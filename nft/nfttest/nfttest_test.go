package nfttest_test

import (
	"net/netip"
	"os"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

const masqueradeBut10 = `
table inet t {
	chain postrouting {
		type nat hook postrouting priority srcnat + 10
		fib daddr type local return
		ip daddr 10.0.0.0/8 return
		ip6 daddr fd00::/8 return
		masquerade
	}
}
`

func TestFarEndSeesTheSourceThatTheRulesSay(t *testing.T) {
	nfttest.Require(t, "nft")
	top := nfttest.NewTopology(t)
	nfttest.NFT(t, top.Node, masqueradeBut10, "-f", "-")
	for _, tt := range []struct {
		dst         string
		from        *nfttest.NS
		masqueraded bool
	}{
		{"198.51.100.1", top.Pod, true},
		{"10.9.0.9", top.Pod, false},
		{"192.0.2.1", top.Pod, false},
		{"10.244.1.1", top.Pod, false},
		{"8.8.4.4", top.Pod, true},
		{"2001:db8:1::1", top.Pod, true},
		{"fd00:9::9", top.Pod, false},
		{"2001:db8:77::1", top.Pod, true},
	} {
		for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP, nfttest.SCTP} {
			dst := netip.MustParseAddr(tt.dst)
			got := nfttest.MustSend(t, top, nfttest.Flow{Proto: proto, From: tt.from, Dst: netip.AddrPortFrom(dst, 5000)})
			t.Log(proto, tt.dst, got)
			if got.Masqueraded() != tt.masqueraded {
				t.Errorf("%s to %s: sent from %s, seen from %s", proto, dst, got.Sent, got.Seen)
			}
		}
	}
}
