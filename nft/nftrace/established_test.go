package nftrace_test

import (
	"fmt"
	"net/netip"
	"testing"

	"nft-masq-agent/nft/nftrace"
	"nft-masq-agent/nft/nfttest"
)

// NAT chains see the first packet of a connection alone: later ones, and those sent again because no answer came,
// would look as if no rule translated them.
func TestOnlyTheFirstPacketOfAConnectionIsShown(t *testing.T) {
	const syn = 0x02
	for _, tt := range []struct {
		name     string
		flow     nfttest.Flow
		from     string // "": the pod
		answered bool
	}{
		{name: "answered", flow: nfttest.Flow{Proto: nfttest.UDP}, answered: true},
		{name: "unanswered", flow: nfttest.Flow{Proto: nfttest.UDP}},
		{name: "SYN sent again", flow: nfttest.Flow{Proto: nfttest.TCP, Flags: syn}},
		{name: "from the node to itself", flow: nfttest.Flow{Proto: nfttest.UDP}, from: "node"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			top := nfttest.NewTopology(t)
			const silent = "table inet silent { chain out { type filter hook output priority 0; " +
				"icmp type destination-unreachable drop; tcp flags rst drop; }; }\n"
			nfttest.NFT(t, top.Outside, silent, "-f", "-")
			nfttest.NFT(t, top.Node, silent+fmt.Sprintf(nat, "masquerade"), "-f", "-")
			flow := tt.flow
			flow.From = top.Pod
			flow.Dst = netip.MustParseAddrPort("203.0.113.9:53")
			source := top.PodV4
			if tt.from == "node" {
				flow.From = top.Node
				flow.Dst = netip.AddrPortFrom(top.NodeV4, 53)
				source = top.NodeV4
			}
			flow.Src = netip.AddrPortFrom(source, 4000)
			saw := nfttest.MustSend(t, top, flow)
			if tt.answered {
				nfttest.MustSend(t, top, nfttest.Flow{
					Proto: flow.Proto, From: top.Outside, To: top.Pod, Src: flow.Dst, Dst: saw.Seen,
				})
			}
			first := flow
			first.Src = netip.AddrPortFrom(source, 4001)
			var failed error
			got, err := trace(t, top, nftrace.Query{To: flow.Dst, Protocol: protocols[flow.Proto]}, func() {
				const more = 20 // than the limit of packets
				for range more {
					if _, err := top.Send(flow); err != nil {
						failed = err
					}
				}
				if _, err := top.Send(first); err != nil {
					failed = err
				}
			})
			if err != nil || failed != nil {
				t.Fatal(err, failed)
			}
			decided := got.Rule != nil && got.Rule.Action == "masquerade"
			if got.Source != first.Src.String() || got.Outcome != nftrace.Translated || !decided {
				t.Errorf("a packet of another connection:\n%s", got)
			}
		})
	}
}
