package answer

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/routes"
)

func TestListsThatMatchNoInterfaceAreReportedWithTheRemedy(t *testing.T) {
	const (
		received = "nothing is masqueraded: no packet passes an interface of masqueradeSrcInterfaces "
		leaving  = "nothing is masqueraded: no packet passes an interface of masqueradeOutInterfaces "
		none     = ", because this node has none of them; "
		byPod    = "`ip route get POD` names the one on which a pod's packets arrive: list that, or use masqueradeSrcCIDRs"
		byOther  = "`ip route get ADDRESS` names the one by which packets leave: list that"
		parts    = ", because those of this node are parts of "
	)
	for _, tt := range []struct {
		src, out, notOut  string   // lists
		node              string   // interfaces besides lo, with MASTER=KIND after a slash
		unmatched, others []string // expected
	}{
		{node: "eth0"},
		{
			src: "veth* cali*", node: "eth0 cni0 veth1/cni0=bridge veth2/cni0=bridge",
			unmatched: []string{received + "(cali*, veth*)" + parts + "cni0; list cni0, or use masqueradeSrcCIDRs"},
		},
		{src: "cali*", node: "eth0 cni0", unmatched: []string{received + "(cali*)" + none + byPod}},
		{src: "veth*", node: "veth1/ovs-system=openvswitch", unmatched: []string{received + "(veth*)" + none + byPod}},
		{src: "veth* cni0", node: "cni0 veth1/cni0=bridge"},
		{src: "veth*", node: "veth1/cni0=bridge veth2"},
		{src: "veth* cni0", node: "veth2", others: []string{"masqueradeSrcInterfaces: this node has no interface cni0"}},
		{
			src: "eth0", node: "eth0/red=vrf",
			unmatched: []string{received + "(eth0)" + parts + "red; list red, or use masqueradeSrcCIDRs"},
		},
		{out: "eth0", node: "eth0/red=vrf"},
		{out: "eth0 ens*", node: "eth0/br0=bridge", unmatched: []string{leaving + "(ens*, eth0)" + parts + "br0; list br0"}},
		{
			src: "cali*", out: "bond0", notOut: "veth* wg* eth0", node: "eth0 cni0 veth1/cni0=bridge",
			unmatched: []string{received + "(cali*)" + none + byPod, leaving + "(bond0)" + none + byOther},
			others: []string{
				"nonMasqueradeOutInterfaces: veth* is a part of cni0 here: list that instead",
				"nonMasqueradeOutInterfaces: this node has no interface wg*",
			},
		},
	} {
		list := func(text string) []config.Interface { return names(strings.Fields(text)...) }
		c := config.Config{
			MasqueradeSrcInterfaces: list(tt.src), MasqueradeOutInterfaces: list(tt.out),
			NonMasqueradeOutInterfaces: list(tt.notOut),
		}
		all := []routes.Interface{{Name: "lo"}}
		for text := range strings.FieldsSeq(tt.node) {
			name, master, _ := strings.Cut(text, "/")
			master, kind, _ := strings.Cut(master, "=")
			all = append(all, routes.Interface{Name: name, Master: master, MasterKind: kind})
		}
		found := Interfaces(neighbors.AbsentInterfaces(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), all))
		want := append(tt.unmatched, tt.others...)
		if diff := cmp.Diff(append([]string{}, want...), texts(append(found.Faults(), found.Remarks()...))); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt, diff)
		}
	}
}
