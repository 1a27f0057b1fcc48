package main

import (
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
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

// Pods of bridge CNI plugins arrive on the bridge, of which their links are ports.
func TestPolicyThatMatchesNoInterfaceIsReported(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "ip")
	n := newBridgeNode(t)
	const base = "enableIPv6: true\nnonMasqueradeCIDRs: [10.9.0.0/16, \"fd00:9::/32\"]\n"
	n.swap(base + "masqueradeSrcInterfaces: [pod*, cali*]\n")
	nfttest.NFT(t, n.top.Node, `table inet cni { chain c { type nat hook postrouting priority 100;
		ip daddr 10.9.0.0/16 masquerade; ip6 daddr fd00:9::/32 masquerade; }; }`, "-f", "-")
	d := n.start("--http-address="+httpAddress, "--resync-interval=1")
	d.await("config_applied")
	port := uint16(7000)
	const (
		src    = "nothing is masqueraded: no packet passes an interface of masqueradeSrcInterfaces "
		out    = "nothing is masqueraded: no packet passes an interface of masqueradeOutInterfaces "
		remedy = ", because those of this node are parts of cni0; list cni0, or use masqueradeSrcCIDRs"
	)
	for _, tt := range []struct {
		config      string
		lists       string // that match nothing
		masqueraded bool   // destinations outside; those that are exempt are if nothing enforces it
		enforced    bool
		says        string // first, in status and in the log
	}{
		{"masqueradeSrcInterfaces: [pod*, cali*]\n", "1", false, false, src + "(cali*, pod*)" + remedy},
		{"masqueradeSrcInterfaces: [pod*]\nenforceNonMasquerade: true\n", "1", false, false, src + "(pod*)" + remedy},
		{"masqueradeOutInterfaces: [wg0]\n", "1", false, false, out + "(wg0), because this node has none of them; " +
			"`ip route get ADDRESS` names the one by which packets leave: list that"},
		{"masqueradeSrcInterfaces: [pod*, cni0]\n", "0", true, false, ""},
		{"masqueradeSrcInterfaces: [cni0]\nenforceNonMasquerade: true\n", "0", true, true, ""},
		{"masqueradeSrcInterfaces: [cni0]\nmasqueradeOutInterfaces: [eth0]\n", "0", true, false, ""},
	} {
		if tt.config != "masqueradeSrcInterfaces: [pod*, cali*]\n" {
			n.swap(base + tt.config)
			d.applied("config", wants(t, base+tt.config))
		}
		if tt.says != "" {
			if line := d.await("interface_list_unmatched"); line["why"] != tt.says || line["level"] != "warn" {
				t.Errorf("the agent logs %v", line)
			}
		}
		d.until("the metric is "+tt.lists, func() bool {
			return n.metric("nft_masq_agent_unmatched_interface_lists") == tt.lists
		})
		r, code := n.status()
		said, _, _ := strings.Cut(tt.says, ", because")
		first, _, _ := strings.Cut(unwrap(n.run("status").stdout), said)
		wrong := tt.says != ""
		if (code == exitFailed) != (wrong || len(r.With(answer.Conflicting)) > 0) || first != "" ||
			len(problems(r, "interface-list-unmatched")) > 0 != wrong || !r.Kernel.InSync {
			t.Errorf("%s: exit code %d: %+v\n%s", tt.config, code, r, n.run("status").stdout)
		}
		if hidden := len(r.With(answer.Prevented)) > 0; hidden != tt.enforced ||
			len(r.With(answer.Conflicting)) > 0 == tt.enforced {
			t.Errorf("%s: conflicts %v, overridden %v", tt.config, r.With(answer.Conflicting), r.With(answer.Prevented))
		}
		for _, of := range []struct{ exempt, outside string }{{"10.9.0.9", "203.0.113.9"}, {"fd00:9::9", "2001:db8:1::1"}} {
			port++
			exempt, outside := netip.MustParseAddr(of.exempt), netip.MustParseAddr(of.outside)
			pod, node := n.top.PodV4, n.top.NodeV4
			if outside.Is6() {
				pod, node = n.top.PodV6, n.top.NodeV6
			}
			want := map[bool]netip.Addr{true: node, false: pod}
			if seen := n.seen(outside, port); seen != want[tt.masqueraded] {
				t.Errorf("%s: %s sees %s", tt.config, outside, seen)
			}
			if seen := n.seen(exempt, port); seen != want[!tt.enforced] {
				t.Errorf("%s: %s sees %s", tt.config, exempt, seen)
			}
		}
	}
}
