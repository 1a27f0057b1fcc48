package health

import (
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/routes"
)

func TestPartOfAnotherInterfaceMatchesNoList(t *testing.T) {
	for _, tt := range []struct {
		src, out, notOut string // lists
		node             string // interfaces, with MASTER=KIND after a slash
		want             string // the absent entries: with a master after a slash, and ! if their list matches nothing
	}{
		{node: "lo"},
		{src: "cni0 veth*", node: "cni0 veth1"},
		{src: "cni0 veth*", node: "veth1", want: "cni0"},
		{src: "cni0 veth*", node: "lo", want: "!cni0 !veth*"},
		{src: "veth*", node: "cni0 veth1/cni0=bridge", want: "!veth*/cni0"},
		{src: "cali* veth*", node: "cni0 veth1/cni0=bridge", want: "!cali* !veth*/cni0"},
		{src: "cni0 veth*", node: "cni0 veth1/cni0=bridge"},
		{src: "veth*", node: "veth1/cni0=bridge veth2"},
		{src: "veth*", node: "veth1/ovs-system=openvswitch", want: "!veth*"},
		{src: "eth0", node: "eth0/red=vrf", want: "!eth0/red"},
		{out: "eth0", node: "eth0/red=vrf"},
		{out: "eth0", node: "eth0/br0=bridge", want: "!eth0/br0"},
		{notOut: "veth* wg0", node: "veth1/cni0=bridge", want: "veth*/cni0 wg0"},
		{src: "cali*", out: "eth0", notOut: "wg*", node: "eth0", want: "!cali* wg*"},
	} {
		list := func(text string) (all []config.Interface) {
			for name := range strings.FieldsSeq(text) {
				all = append(all, config.Interface{Name: name})
			}
			return all
		}
		p := nft.NewPolicy(config.Config{
			MasqueradeSrcInterfaces: list(tt.src), MasqueradeOutInterfaces: list(tt.out),
			NonMasqueradeOutInterfaces: list(tt.notOut),
		}, nft.Options{Layout: native.Layout{}})
		var all []routes.Interface
		for text := range strings.FieldsSeq(tt.node) {
			name, master, _ := strings.Cut(text, "/")
			master, kind, _ := strings.Cut(master, "=")
			all = append(all, routes.Interface{Name: name, Master: master, MasterKind: kind})
		}
		var got []string
		for _, i := range absentInterfaces(p, all) {
			text := strings.TrimSuffix(fmt.Sprintf("%s/%s", i.Name, i.Master), "/")
			got = append(got, map[bool]string{true: "!"}[i.Exclusive]+text)
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
	if absent := absentInterfaces(nft.Policy{}, nil); absent != nil {
		t.Error(absent)
	}
}
