package main

import (
	"net"
	"net/netip"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// newTwoUplinks returns a node that has a second link to the outside host, with the
// addresses 198.18.1.1 and 2001:db8:18::1.
func newTwoUplinks(t *testing.T) trafficNode {
	t.Helper()
	n := newTrafficNode(t)
	here := netns.End{NS: n.top.Node, Dev: "eth1", MAC: net.HardwareAddr{2, 0, 0, 0, 3, 1}}
	there := netns.End{NS: n.top.Outside, Dev: "eth1", MAC: net.HardwareAddr{2, 0, 0, 0, 3, 2}}
	n.check(netns.AddVeth(here, there))
	for _, e := range []netns.End{here, there} {
		n.check(e.NS.LinkUp(e.Dev))
	}
	for i, e := range []netns.End{here, there} {
		peer := []netns.End{there, here}[i]
		n.check(e.NS.AwaitCarrier(e.Dev))
		for _, p := range [][]string{{"198.18.1.1/24", "2001:db8:18::1/64"}, {"198.18.1.100/24", "2001:db8:18::100/64"}}[i] {
			n.check(e.NS.AddAddr(e.Dev, netip.MustParsePrefix(p)))
			n.check(peer.NS.AddNeighbour(peer.Dev, netip.MustParsePrefix(p).Addr(), e.MAC))
		}
	}
	return n
}

// newBridgeNode returns a node whose pod is connected as bridge CNI plugins do it: its link
// is a port of cni0, which has the node's addresses for pods.
func newBridgeNode(t *testing.T) trafficNode {
	t.Helper()
	n := newTrafficNode(t)
	nfttest.Run(t, n.top.Node, `link add cni0 address 02:00:00:00:01:01 type bridge
link set pod0 address 02:00:00:00:01:09
address flush dev pod0
link set cni0 up
link set pod0 master cni0
address add 10.244.1.1/32 dev cni0
address add fd00:10:244:1::1/128 dev cni0 nodad
route replace 10.244.1.2/32 dev cni0
route del fd00:10:244:1::2/128 dev pod0
route add fd00:10:244:1::2/128 dev cni0
neighbor replace 10.244.1.2 lladdr 02:00:00:00:01:02 dev cni0
neighbor replace fd00:10:244:1::2 lladdr 02:00:00:00:01:02 dev cni0
`, "ip", "-batch", "-")
	n.check(n.top.Node.AwaitCarrier("cni0"))
	return n
}
