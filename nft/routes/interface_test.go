package routes

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

func TestPartsOfABridgeNeitherReceiveNorSend(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNode(t, "link add cni0 type bridge", "link set cni0 up", "link add eth0 type veth peer name veth0",
		"link set veth0 master cni0")
	got := nfttest.In(t, ns, Interfaces)
	indexes := map[uint32]bool{}
	for i := range got {
		indexes[got[i].Index] = true
		got[i].Index = 0
	}
	want := []Interface{
		{Name: "lo"},
		{Name: "cni0", Kind: "bridge"},
		{Name: "veth0", Kind: "veth", Master: "cni0", MasterKind: "bridge"},
		{Name: "eth0", Kind: "veth"},
	}
	if diff := cmp.Diff(want, got); diff != "" || len(indexes) != len(want) {
		t.Errorf("%v (-want +got):\n%s", indexes, diff)
	}
	for _, tt := range []struct {
		Interface
		receives, sends bool
	}{
		{Interface{}, true, true},
		{Interface{Master: "cni0", MasterKind: "bridge"}, false, false},
		{Interface{Master: "bond0", MasterKind: "bond"}, false, false},
		{Interface{Master: "red", MasterKind: "vrf"}, false, true},
	} {
		if tt.Receives() != tt.receives || tt.Sends() != tt.sends {
			t.Errorf("%+v: receives %t, sends %t", tt.Interface, tt.Receives(), tt.Sends())
		}
	}
}

// A rule for the source of a pod leads to another uplink.
func TestTheWayTowardADestinationIsThatOfTheSource(t *testing.T) {
	t.Parallel()
	ns := newRouter(t, both(defaults+"rule add priority 9 from POD lookup 100\n"))
	for _, tt := range []struct{ src, dst, want string }{
		{"", "203.0.113.9", "eth0"},
		{"10.244.1.2", "203.0.113.9", "eth1"},
		{"", "10.244.1.2", "pod0"},
		{"", "2001:db8:7::9", "eth0"},
		{"fd00:10:244:1::2", "2001:db8:7::9", "eth1"},
		{"", "fd00:10:244:1::2", "pod0"},
	} {
		src, _ := netip.ParseAddr(tt.src)
		got := nfttest.In(t, ns, func() (string, error) { return Toward(src, netip.MustParseAddr(tt.dst)) })
		if got != tt.want {
			t.Errorf("%q to %s: %q, want %q", tt.src, tt.dst, got, tt.want)
		}
	}
}
