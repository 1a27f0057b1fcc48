package routes

import (
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

func TestPodsAreBehindInterfacesThatLeadIntoTheNode(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	nfttest.IP(
		t, ns,
		"link add cni0 type bridge", "link add cali1 type veth peer name peer1", "link add uplink type veth peer name peer2",
		"link add vx type vxlan id 7 dstport 4789", "link set cni0 up", "link set cali1 up", "link set peer1 up",
		"link set uplink up",
		"link set peer2 up", "link set vx up",
		"addr add 10.244.1.1/24 dev cni0", "addr add 192.0.2.1/24 dev uplink", "addr add fd00:1::1/64 dev cni0 nodad",
		"addr add fd00:2::1/128 dev cali1 nodad",
		"route add default via 192.0.2.9 dev uplink", "route add 10.244.2.7/32 dev cali1",
		"route add 192.0.2.77/32 dev uplink", "route add 10.244.3.0/24 dev cali1", "route add 10.244.4.4/32 dev vx",
		"neigh add 10.244.1.5 lladdr 02:00:00:00:00:05 dev cni0", "neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev uplink",
		"neigh add 10.244.2.7 lladdr 02:00:00:00:00:07 dev cali1", "neigh add 10.244.9.0 lladdr 02:00:00:00:00:08 dev vx",
		"neigh add 10.244.1.6 nud failed dev cni0", "neigh add 10.244.1.7 lladdr 02:00:00:00:00:04 dev cni0",
		"link add second type veth peer name peer3", "link set second up", "link set peer3 up",
		"addr add 198.51.100.1/24 dev second", "route add default via 198.51.100.9 dev second table 100",
		"neigh add 198.51.100.9 lladdr 02:00:00:00:00:06 dev second",
		"neigh add fd00:1::5 lladdr 02:00:00:00:00:05 dev cni0", "neigh add fe80::5 lladdr 02:00:00:00:00:05 dev cni0",
	)
	for ipv6, want := range map[bool][]Pod{
		false: {
			{netip.MustParseAddr("10.244.1.5"), "cni0"},
			{netip.MustParseAddr("10.244.1.7"), "cni0"},
			{netip.MustParseAddr("10.244.2.7"), "cali1"},
		},
		true: {{netip.MustParseAddr("fd00:1::5"), "cni0"}},
	} {
		pods := nfttest.In(t, ns, func() ([]Pod, error) { return Pods(ipv6) })
		if !slices.Equal(pods, want) {
			t.Errorf("IPv6 %t: %v, want %v", ipv6, pods, want)
		}
	}
}
