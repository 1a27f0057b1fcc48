package cluster_test

import (
	"fmt"
	"net/netip"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// Packets of pods get a mark by their destination, which a rule of routing has.
const uplinkMarks = `table inet marks { chain pre { type filter hook prerouting priority mangle;
iifname { "cni0", "cni1", "veth*" } ip daddr 198.51.100.7 meta mark set meta mark | 0x100
iifname { "cni0", "cni1", "veth*" } ip6 daddr 2001:db8:1::7 meta mark set meta mark | 0x100
}; }
`

// uplinks tries a node with a second uplink, a second routing table, and rules that
// choose it by source and by mark; and a pod with a second interface.
func uplinks(t *testing.T) {
	l := newLab(t)
	l.routePods()
	node := l.inside[0]
	must(t, netns.AddVeth(netns.End{NS: l.outside, Dev: "second", MAC: mac(20)},
		netns.End{NS: node, Dev: "eth1", MAC: mac(21)}))
	for _, ns := range []*nfttest.NS{l.outside, node} { // replies come by the other uplink
		must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", "0"))
		for _, dev := range []string{"br0", "second", "eth0", "eth1"} {
			_ = ns.Sysctl("net.ipv4.conf."+dev+".rp_filter", "0") // the devices that it has
		}
	}
	l.ip(l.outside, "link set second up", "address add 198.18.0.100/24 dev second",
		"address add 2001:db8:18::100/64 dev second nodad", "address add 203.0.113.9/32 dev br0",
		"address add 2001:db8:3::9/128 dev br0 nodad", "address add 198.51.100.7/32 dev br0",
		"address add 2001:db8:1::7/128 dev br0 nodad", "route add 10.245.1.0/24 via 192.0.2.11",
		"-6 route add fd00:10:245:1::/64 via 2001:db8::11")
	l.ip(node, "link set eth1 up", "address add 198.18.0.11/24 dev eth1",
		"address add 2001:db8:18::11/64 dev eth1 nodad", "route add default via 198.18.0.100 table 100",
		"-6 route add default via 2001:db8:18::100 table 100",
		"rule add priority 100 from 10.244.1.0/24 to 203.0.113.0/24 lookup 100",
		"-6 rule add priority 100 from fd00:10:244:1::/64 to 2001:db8:3::/64 lookup 100",
		"rule add priority 101 fwmark 0x100/0x100 lookup 100", "-6 rule add priority 101 fwmark 0x100/0x100 lookup 100")
	nfttest.NFT(t, node, uplinkMarks, "-f", "-")
	for _, a := range []string{"203.0.113.9", "2001:db8:3::9", "198.51.100.7", "2001:db8:1::7"} {
		echo(t, l.outside, netip.AddrPortFrom(addr(a), 8080))
	}
	for _, connect := range []string{"ptp", "bridge"} {
		l.renew(plugin(connect, "nftables", false))
		pod := l.pods[0]
		second := l.network(l.nodes[0], 1, "bridge", "nftables", false)[:1]
		second[0]["name"], second[0]["bridge"] = "second", "cni1"
		second[0]["ipam"] = map[string]any{
			"type": "host-local", "dataDir": l.Dir + "/second", "ranges": []any{
				[]any{map[string]any{"subnet": "10.245.1.0/24"}}, []any{map[string]any{"subnet": "fd00:10:245:1::/64"}},
			},
		}
		at := l.attach(pod, "net1", second)
		l.ip(pod.ns, "route add default via 10.245.1.1 table 7", "-6 route add default via fd00:10:245:1::1 table 7",
			"rule add from 10.245.1.0/24 lookup 7", "-6 rule add from fd00:10:245:1::/64 lookup 7")
		before := l.count
		for _, mode := range proxyModes() {
			l.startProxies(mode)
			for _, p := range labPolicies(podInterface(pod.list())) {
				l.enforce(p.config)
				name := connect + ", kube-proxy " + mode + ", " + p.name
				l.labMatrix(t, name, masquerades{}, p)
				l.uplinkMatrix(t, name, at, p)
			}
			l.cleanProxies()
		}
		l.rows = append(l.rows, fmt.Sprintf("| %s | %d | %d |", connect, l.connections-before.connections,
			l.explained-before.explained))
	}
	l.record("uplinks", "pods on | connections | answers of explain")
}

// uplinkMatrix opens connections that leave by the second uplink, or from a pod's second
// interface.
func (l *lab) uplinkMatrix(t *testing.T, name string, second []netip.Addr, p policy) {
	t.Helper()
	either := func(v4, v6 string) place {
		return func(f family, _ policy) netip.Addr { return addr(map[bool]string{true: v4, false: v6}[f.near.Is4()]) }
	}
	other := func(f family, _ policy) netip.Addr { return f.second }
	eth1, bySource := either("198.18.0.11", "2001:db8:18::11"), either("203.0.113.9", "2001:db8:3::9")
	onSecond := other
	if p.config == policies[0].config { // the others name the sources
		onSecond = node1
	}
	for i := range l.families {
		l.families[i].second = second[i]
	}
	l.matrix(t, name, l.families, []row{
		{"by a rule with the source", "near", bySource, 8080, true, eth1},
		{"by a mark", "near", either("198.51.100.7", "2001:db8:1::7"), 8080, true, eth1},
		{"node, which the rules do not match", "node1", bySource, 8080, true, node1},
		{"second interface to outside", "near's other interface", outside, 8080, true, onSecond},
		{"second interface to an exempt address", "near's other interface", exempt, 8080, true, other},
	}, p)
}

// list are the configs that a pod's first network has.
func (p *labPod) list() []map[string]any { return []map[string]any{p.attached[0].conf} }
