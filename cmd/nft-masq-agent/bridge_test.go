package main

import (
	"testing"

	"nft-masq-agent/nft/nfttest"
)

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
