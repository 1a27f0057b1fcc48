package main

import (
	"cmp"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/nft"
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

// ip runs ip commands on the node, for both families: V is the gateway of the second link,
// W that of the first one.
func (n trafficNode) ip(commands string) {
	n.t.Helper()
	for flag, gateways := range map[string]*strings.Replacer{
		"-4": strings.NewReplacer("V", "198.18.1.100", "W", "192.0.2.100", "POD", "10.244.1.2"),
		"-6": strings.NewReplacer("V", "2001:db8:18::100", "W", "2001:db8::100", "POD", "fd00:10:244:1::2"),
	} {
		nfttest.Run(n.t, n.top.Node, gateways.Replace(commands), "ip", flag, "-batch", "-")
	}
}

const (
	otherTable  = "route add default via V dev eth1 table 100\nroute add POD dev pod0 table 100\n"
	severalHops = "route replace default nexthop via W dev eth0 nexthop via V dev eth1\n"
	markByPort  = `table inet marks { chain c { type filter hook prerouting priority mangle;
		th dport 7000-7031 meta mark set 0x10; }; }`
)

// Routes may depend on what is not known about a connection. Then the headline lists what
// the far end may see.
func TestHeadlineListsWhatTheFarEndMaySeeByRouting(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "ip")
	for _, tt := range []struct {
		name, ip string
		byPorts  bool // net.ipv4 and net.ipv6.fib_multipath_hash_policy
		on       string
		// By which link UDP to ports 7000 to 7031, UDP to 7032 to 7063, and TCP leave: by the
		// first (0), the second (1), each (2), or the same one (=). of6 is that of IPv6 if
		// it differs.
		of, of6 string
	}{
		{name: "one route", of: "000"},
		{name: "mark", ip: otherTable + "rule add priority 9 fwmark 0x10 lookup 100", of: "100", on: "ip rule 9"},
		{name: "not a mark", ip: otherTable + "rule add priority 9 not fwmark 0x10 lookup 100", of: "011", on: "ip rule 9"},
		{name: "protocol", ip: otherTable + "rule add priority 9 ipproto tcp lookup 100", of: "001", on: "ip rule 9"},
		{name: "ports", ip: otherTable + "rule add priority 9 dport 7000-7031 lookup 100", of: "100", on: "ip rule 9"},
		{name: "interface and source", ip: otherTable + "rule add priority 9 from POD iif pod0 lookup 100", of: "111"},
		{name: "next hops by ports", ip: severalHops, byPorts: true, of: "222", on: "next hop"},
		{name: "next hops by addresses, and by the flow label", ip: severalHops, of: "===", of6: "222", on: "next hop"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
				n := newTwoUplinks(t)
				n.ip(tt.ip + "\n")
				policy := map[bool]string{true: "1", false: "0"}[tt.byPorts]
				n.check(n.top.Node.Sysctl("net.ipv4.fib_multipath_hash_policy", policy))
				n.check(n.top.Node.Sysctl("net.ipv6.fib_multipath_hash_policy", policy))
				nfttest.NFT(t, n.top.Node, markByPort, "-f", "-")
				n.enforce("", flag, "--enable-ipv6")
				n.seesByRouting(tt.of, tt.on, "203.0.113.9", [2]string{"192.0.2.1", "198.18.1.1"}, flag)
				n.seesByRouting(cmp.Or(tt.of6, tt.of), tt.on, "2001:db8:1::1", [2]string{"2001:db8::1", "2001:db8:18::1"}, flag)
			})
		})
	}
}

// seesByRouting compares what the far end sees of flows from the pod with the headline.
func (n trafficNode) seesByRouting(of, on, to string, links [2]string, flag string) {
	n.t.Helper()
	dst, pod := netip.MustParseAddr(to), n.top.PodV4
	if dst.Is6() {
		pod = n.top.PodV6
	}
	x, text := n.explained(dst.String(), "--from", pod.String(), "--config", n.path, flag, "--enable-ipv6")
	all := map[netip.Addr]bool{}
	for i, group := range []struct {
		nfttest.Proto
		first, flows uint16
	}{{nfttest.UDP, 7000, 32}, {nfttest.UDP, 7032, 32}, {nfttest.TCP, 7100, 16}} {
		seen := map[string]bool{}
		for port := group.first; port < group.first+group.flows; port++ {
			flow := nfttest.Flow{Proto: group.Proto, From: n.top.Pod, To: n.top.Outside, Dst: netip.AddrPortFrom(dst, port)}
			a := nfttest.MustSend(n.t, n.top, flow).Seen.Addr()
			seen[a.String()] = true
			if !all[a] {
				n.judge(x, a)
			}
			all[a] = true
		}
		want := map[byte][]string{'0': links[:1], '1': links[1:], '2': links[:], '=': {x.Sees}}[of[i]]
		slices.Sort(want)
		if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, want) {
			n.t.Errorf("flows %d to %s are seen from %v, want %v", i, dst, got, want)
		}
	}
	if unknown := x.Why.Code == "unknown"; unknown != (len(all) > 1) || unknown && !strings.Contains(x.Headline, on) {
		n.t.Errorf("seen from %v, explained is:\n%s", slices.Collect(maps.Keys(all)), text)
	}
}

// With the SNAT of the AWS VPC CNI, a mark leads pods on a secondary interface to everything outside of
// the VPC by the primary one (pkg/networkutils/network.go, SetupHostNetwork). The far end shows which
// interface exempt packets leave by, and status warns if it is not that of the pod's address.
func TestMarkThatLeadsExemptPacketsOutByAnotherInterfaceIsReported(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "ip", "iptables-nft-restore")
	const enforces = "masqueradeSrcCIDRs: [10.244.0.0/16]\nenforceNonMasquerade: true\n"
	const exempts = "nonMasqueradeCIDRs: [10.244.0.0/16, 198.51.100.0/24]\n"
	const secondary = "rule add priority 1536 from POD lookup 100\n"
	const vpcAlone, excluded = "ip daddr 10.244.0.0/16 return", "ip daddr { 10.244.0.0/16, 198.51.100.0/24 } return"
	const chain, more = "-A AWS-SNAT-CHAIN-0 -d 10.244.0.0/16", "-A AWS-SNAT-CHAIN-0 -d 198.51.100.0/24 -j RETURN\n"
	const warning = "pods keep their address to 198.51.100.2, but a mark may lead 10.244.1.2 there by eth0; the mark " +
		"decides before ip rule 1536: from 10.244.1.2/32 to 0.0.0.0/0 lookup 100, and stays although " +
		"enforceNonMasquerade prevents the translation in ip nat AWS-SNAT-CHAIN-0; EC2 drops such packets of secondary " +
		"interfaces; with AWS VPC CNI, list it in AWS_VPC_K8S_CNI_EXCLUDE_SNAT_CIDRS, too"
	external := func(text string) string { // nothing but what NodePorts need
		mangle, _, _ := strings.Cut(text, "*nat\n")
		return map[bool]string{true: mangle}[strings.HasPrefix(text, "*mangle")]
	}
	iptables := func(text string) string {
		if strings.HasPrefix(text, "table") {
			return ""
		}
		return strings.Replace(text, "*nat\n", `*nat
:AWS-CONNMARK-CHAIN-0 -
-A PREROUTING -i eni+ -m comment --comment "AWS, outbound connections" -j AWS-CONNMARK-CHAIN-0
-A PREROUTING -m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
-A AWS-CONNMARK-CHAIN-0 -d 10.244.0.0/16 -m comment --comment "AWS CONNMARK CHAIN" -j RETURN
-A AWS-CONNMARK-CHAIN-0 -m comment --comment "AWS, CONNMARK" -j CONNMARK --set-xmark 0x80/0x80
`, 1)
	}
	for _, tt := range []struct {
		name, config, ip string
		rules            func(string) string
		by, sees         string
		warns            bool
	}{
		{"its SNAT", enforces + exempts, secondary, nil, "eth0", "10.244.1.2", true},
		{"its SNAT, by iptables", enforces + exempts, secondary, iptables, "eth0", "10.244.1.2", true},
		{"its SNAT, not enforced", exempts, secondary, nil, "eth0", "192.0.2.1", false},
		{"its SNAT, a pod on the primary interface", enforces + exempts, "", nil, "eth0", "10.244.1.2", false},
		{
			"AWS_VPC_K8S_CNI_EXCLUDE_SNAT_CIDRS", enforces + exempts, secondary,
			strings.NewReplacer(vpcAlone, excluded, chain, more+chain).Replace, "eth1", "10.244.1.2", false,
		},
		{
			"only the VPC is exempt", enforces + "nonMasqueradeCIDRs: [10.244.0.0/16]\n", secondary, nil, "eth0", "192.0.2.1",
			false,
		},
		{"AWS_VPC_K8S_CNI_EXTERNALSNAT", enforces + exempts, secondary, external, "eth1", "10.244.1.2", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newTwoUplinks(t)
			n.ip(otherTable + "rule add priority 512 to POD lookup main\n" +
				"rule add priority 1024 fwmark 0x80/0x80 lookup main\n" + tt.ip)
			nfttest.LoadForeign(t, n.top.Node, "../../testdata/foreign/amazon-vpc-cni-nftables", func(text string) string {
				if tt.rules != nil {
					text = tt.rules(text)
				}
				return strings.ReplaceAll(text, "eni", "pod")
			})
			nfttest.NFT(t, n.top.Outside, `table inet seen { set by { type ifname; flags dynamic; }
				chain c { type filter hook prerouting priority 0; ip daddr 198.51.100.1 update @by { iifname }; }; }`, "-f", "-")
			n.enforce(tt.config)
			seen := n.seen(netip.MustParseAddr("198.51.100.1"), 7000)
			x, _ := n.explained("198.51.100.1", "--config", n.path, "--from", "10.244.1.2")
			n.judge(x, seen)
			by := nfttest.NFT(t, n.top.Outside, "", "list", "set", "inet", "seen", "by")
			if seen.String() != tt.sees || !strings.Contains(by, `{ "`+tt.by+`" }`) {
				t.Errorf("seen from %s, by %s", seen, by)
			}
			r, _ := n.status("--config", n.path)
			if got := strings.Join(problems(r, health.RoutingRules), "\n"); got != map[bool]string{true: warning}[tt.warns] {
				t.Errorf("status warns %q", got)
			}
		})
	}
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
