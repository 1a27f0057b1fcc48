package routes

import (
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
