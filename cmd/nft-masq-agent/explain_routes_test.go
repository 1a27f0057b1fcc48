package main

import (
	"net"
	"net/netip"
	"testing"

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

// newBridgeNode returns a node whose pod is connected to a bridge.
func newBridgeNode(t *testing.T) trafficNode {
	t.Helper()
	n := newTrafficNode(t)
	n.top.Bridge(t)
	return n
}
