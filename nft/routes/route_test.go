package routes

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/node"
)

// newRouter returns a node with two uplinks and the link of a pod.
func newRouter(t *testing.T, commands string) *nfttest.NS {
	t.Helper()
	ns := nfttest.NewNS(t, "node")
	for _, s := range [][2]string{
		{"net.ipv4.ip_forward", "1"},
		{"net.ipv6.conf.all.forwarding", "1"},
		{"net.ipv6.conf.default.accept_dad", "0"},
		{"net.ipv4.conf.all.rp_filter", "0"},
		{"net.ipv4.conf.default.rp_filter", "0"},
		{"net.ipv4.fib_multipath_hash_policy", "0"},
	} {
		nfttest.NoError(t, ns.Sysctl(s[0], s[1]))
	}
	nfttest.IP(t, ns, nfttest.Links("eth0", "eth1", "eth2", "pod0"), `address add 192.0.2.1/24 dev eth0
address add 198.51.100.1/24 dev eth1
address add 2001:db8::1/64 dev eth0 nodad
address add 2001:db8:1::1/64 dev eth1 nodad
route add 10.244.1.2/32 dev pod0
-6 route add fd00:10:244:1::2/128 dev pod0
`, commands)
	return ns
}

// way is the interface and the address of a route.
func way(r Route) string {
	words := []string{r.Egress.Name}
	if r.Type != unix.RTN_UNICAST {
		words = append(words, fmt.Sprintf("type %d", r.Type))
	}
	if r.Address.IsValid() {
		words = append(words, r.Address.String())
	}
	return strings.TrimSpace(strings.Join(words, " "))
}

// defaults are two default routes; V and W are gateways by eth0 and eth1.
const defaults = "route add default via V\nroute add default via W table 100\n"

// both returns commands for both families.
func both(commands string) (all string) {
	v4 := strings.NewReplacer("V", "192.0.2.9", "W", "198.51.100.9", "N", "4", "DST", "203.0.113.0/24",
		"ELSEWHERE", "10.0.0.0/8", "POD", "10.244.1.2", "RANGE", "10.244.1.0/24", "HERE", "198.51.100.1")
	v6 := strings.NewReplacer("V", "2001:db8::9", "W", "2001:db8:1::9", "N", "6", "DST", "2001:db8:7::/48",
		"ELSEWHERE", "fd00::/8", "POD", "fd00:10:244:1::2", "RANGE", "fd00:10:244:1::/64", "HERE", "2001:db8:1::1")
	for line := range strings.Lines(commands) {
		all += v4.Replace(line)
		if !strings.HasPrefix(line, "nexthop") { // those have no family if they are groups
			all += "-6 "
		}
		all += v6.Replace(line)
	}
	return all
}

// testdata/lookups.txt has a paragraph for each: its name, commands of ip for both families (rules have the priorities
// 9, 10 and so on; without routes, there are two default ones), the query, its way ("> "), and the interface and the
// type of the route back ("< ").
func TestLookupFindsTheWayOfThePacket(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/lookups.txt")
	nfttest.NoError(t, err)
	for paragraph := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		first, rest, _ := strings.Cut(paragraph, "\n")
		t.Run(strings.TrimPrefix(first, "# "), func(t *testing.T) {
			t.Parallel()
			var q Query
			var commands, rules, want, back string
			var err error
			ns := newRouter(t, "")
			src := "POD"
			priority := 9
			for line := range strings.SplitSeq(rest, "\n") {
				word, value, _ := strings.Cut(line, " ")
				switch word {
				case "rule":
					rules += fmt.Sprintf("rule add priority %d %s\n", priority, value)
					priority++
				case "sysctl":
					name, to, _ := strings.Cut(value, "=")
					err = ns.Sysctl(name, to)
				case "src":
					src = strings.ToUpper(value)
				case "out":
					q.Interface = value
				case "udp":
					q.Protocol = unix.IPPROTO_UDP
					_, err = fmt.Sscan(value, &q.Port)
				case ">":
					want = value
				case "<":
					back = value
				default:
					commands += line + "\n"
				}
				if err != nil {
					t.Fatalf("%s: %v", line, err)
				}
			}
			if commands == "" {
				commands = defaults
			}
			nfttest.IP(t, ns, both(commands+rules))
			for _, dst := range []string{"203.0.113.9", "2001:db8:7::9"} {
				names := strings.NewReplacer("POD", "10.244.1.2", "NODE", "192.0.2.1", "STRANGER", "10.99.9.9")
				q.Dst = netip.MustParseAddr(dst)
				if q.Dst.Is6() {
					names = strings.NewReplacer("POD", "fd00:10:244:1::2", "NODE", "2001:db8::1", "STRANGER", "fd00:99::9")
					want = strings.NewReplacer("192.0.2.1", "2001:db8::1", "198.51.100.1", "2001:db8:1::1").Replace(want)
				}
				if src != "NONE" {
					q.Src = netip.MustParseAddr(names.Replace(src))
				}
				r := nfttest.In(t, ns, func() (Route, error) { return Lookup(q) })
				if got := way(r); got != want {
					t.Errorf("to %s: %s, want %s", dst, got, want)
				}
				if got := fmt.Sprintf("%s type %d", r.Ingress.Name, r.SourceType); back != "" && got != back {
					t.Errorf("to %s: back by %s, want %s", dst, got, back)
				}
			}
		})
	}
}

func TestRouteTypesAreThoseOfTheKernel(t *testing.T) {
	top := nfttest.NewTopology(t)
	for a, typ := range map[netip.Addr]int{
		top.NodeV4:                                unix.RTN_LOCAL,
		top.NodeV6:                                unix.RTN_LOCAL,
		netip.MustParseAddr("127.1.2.3"):          unix.RTN_LOCAL,
		netip.MustParseAddr("::1"):                unix.RTN_LOCAL,
		top.OutsideV4:                             unix.RTN_UNICAST,
		top.OutsideV6:                             unix.RTN_UNICAST,
		netip.MustParseAddr("192.0.2.255"):        unix.RTN_BROADCAST,
		netip.MustParseAddr("224.0.0.1"):          unix.RTN_MULTICAST,
		netip.MustParseAddr("fe80::1%whatever"):   unix.RTN_LOCAL,
		netip.MustParseAddr("2001:db8:ffff::1%x"): unix.RTN_UNICAST,
	} {
		got := nfttest.In(t, top.Node, func() (Route, error) { return Lookup(Query{Dst: a}) })
		if got.Type != typ || got.Egress.Name == "" {
			t.Errorf("%s: %+v, want type %d", a, got, typ)
		}
	}
	// The kernel does not say how it would forward IPv6 multicast.
	group := Query{Src: top.PodV6, Dst: netip.MustParseAddr("ff05::7")}
	got := nfttest.In(t, top.Node, func() (Route, error) { return Lookup(group) })
	if got.Type != unix.RTN_MULTICAST {
		t.Errorf("%s: %+v", group.Dst, got)
	}
}

func TestLocalPrefixesAreTheNodesAddresses(t *testing.T) {
	top := nfttest.NewTopology(t)
	nfttest.Run(t, top.Node, "", "ip", "route", "add", "local", "198.51.100.64/26", "dev", "lo")
	all := nfttest.In(t, top.Node, Networks)
	local := slices.DeleteFunc(all, func(n Network) bool { return n.Type != unix.RTN_LOCAL })
	holds := func(a netip.Addr) bool {
		return slices.ContainsFunc(local, func(n Network) bool { return n.Contains(a) })
	}
	for a, want := range map[netip.Addr]bool{
		top.NodeV4: true, top.NodeV6: true, top.GatewayV4: true, top.GatewayV6: true, netip.IPv6Loopback(): true,
		netip.MustParseAddr("127.8.8.8"): true, netip.MustParseAddr("198.51.100.77"): true,
		top.OutsideV4: false, top.OutsideV6: false, top.PodV4: false, top.PodV6: false,
		netip.MustParseAddr("192.0.2.255"): false, netip.MustParseAddr("198.51.100.1"): false,
	} {
		if holds(a) != want {
			t.Errorf("%s is among %v: %t", a, local, !want)
		}
	}
}

func TestNetworksAreTheMainTablesRoutes(t *testing.T) {
	top := nfttest.NewTopology(t)
	nfttest.IP(t, top.Node, "route add 10.244.7.0/24 via 192.0.2.254", "route add blackhole 10.245.0.0/16",
		"route add 10.246.0.0/16 table 77 via 192.0.2.254", "route add 10.244.1.9/32 dev lo",
		"-6 route add fd00:7::/64 via 2001:db8::254",
		"route add 10.247.0.0/16 nexthop via 192.0.2.254 dev eth0 nexthop dev lo",
		"route add 10.248.0.0/16 via 192.0.2.254 proto kernel")
	var got []string
	all := nfttest.In(t, top.Node, Networks)
	for _, n := range all {
		if n.Main && n.Type == unix.RTN_UNICAST && !n.Addr().IsMulticast() && !n.Addr().IsLinkLocalUnicast() {
			got = append(got, fmt.Sprintf("%s %s %t", n.Prefix, n.Interface, n.Connected))
		}
	}
	for want, is := range map[string]bool{
		"192.0.2.0/24 eth0 true": true, "10.244.7.0/24 eth0 false": true, "10.244.1.9/32 lo false": true,
		"fd00:7::/64 eth0 false": true, "2001:db8::/64 eth0 true": true, "10.247.0.0/16 eth0 false": true,
		"10.247.0.0/16 lo false": true, "10.248.0.0/16 eth0 false": true,
		"10.245.0.0/16  false": false, "10.246.0.0/16 eth0 false": false,
	} {
		if slices.Contains(got, want) != is {
			t.Errorf("%s: want %t in\n%s", want, is, strings.Join(got, "\n"))
		}
	}
	for _, p := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		if !slices.ContainsFunc(all, func(n Network) bool { return n.Prefix == p }) {
			t.Errorf("no default route %s: %v", p, all)
		}
	}
	nfttest.IP(t, top.Node, "-6 route del default")
	for _, n := range nfttest.In(t, top.Node, Networks) {
		if n.Prefix == netip.MustParsePrefix("::/0") && n.Type == unix.RTN_UNICAST {
			t.Errorf("a default route of IPv6: %+v", n)
		}
	}
}

// A far end sees the address that is expected of masquerading.
func TestMasqueradingAssignsTheExpectedAddress(t *testing.T) {
	t.Parallel()
	const (
		v4, v6    = "192.0.2.1", "2001:db8::1"
		elsewhere = "address add 198.51.100.7/32 dev lo\naddress add 2001:db8:3::7/128 dev lo nodad\n"
		add       = "address add "
		without   = "address del 192.0.2.1/24 dev eth0\n"
		other     = "address add 198.51.100.7/24 dev eth0\n"
		onLink    = "route add default via 192.0.2.100 dev eth0 onlink\n"
		named     = "route replace default via 192.0.2.100 src "
		named6    = "-6 route replace default via 2001:db8::100 src "
		old       = "address change 2001:db8::1/64 dev eth0 preferred_lft 0\n"
		without6  = "address del 2001:db8::1/64 dev eth0\n"
	)
	for _, tt := range []struct {
		name, commands string
		v4, v6         string // expected, "": not known
	}{
		{"one address", "", v4, v6},
		{"others of its network", add + "192.0.2.7/24 dev eth0\n" + add + "2001:db8::7/64 dev eth0 nodad", v4, "the same"},
		{"of two networks, the one near the destination", add + "2001:db8:8000::7/64 dev eth0 nodad", v4, v6},
		{"another network first", without + other + add + "192.0.2.1/24 dev eth0\n" + onLink, v4, v6},
		{"no network of the gateway", without + other + onLink, "198.51.100.7", v6},
		{
			"the route names the second of two",
			without + other + add + "203.0.114.7/24 dev eth0\n" + strings.TrimSpace(onLink) + " src 203.0.114.7",
			"198.51.100.7", v6,
		},
		{"destination on the link", add + "203.0.113.1/24 dev eth0", "203.0.113.1", v6},
		{"the route names another one", add + "192.0.2.7/32 dev lo\n" + named + "192.0.2.7", v4, v6},
		{"the route of IPv6 does", add + "2001:db8::7/128 dev lo nodad\n" + named6 + "2001:db8::7", v4, v6},
		{"a deprecated one", old + add + "2001:db8:3::7/64 dev eth0 nodad", v4, "2001:db8:3::7"},
		{"a deprecated one, another elsewhere", old + add + "2001:db8:3::7/128 dev lo nodad", v4, ""},
		{"only elsewhere", elsewhere + without6 + without + onLink, "", ""},
		{"gateway of another family", "route replace default via inet6 2001:db8::100 dev eth0", v4, v6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			top := nfttest.NewTopology(t)
			nfttest.IP(t, top.Node, tt.commands)
			const table = "table inet x { chain c { type nat hook postrouting priority 100; masquerade; }; }"
			nfttest.NFT(t, top.Node, table, "-f", "-")
			for _, of := range []struct {
				src  netip.Addr
				dst  string
				want string
			}{{top.PodV4, "203.0.113.9", tt.v4}, {top.PodV6, "2001:db8:1::1", tt.v6}} {
				dst := netip.MustParseAddr(of.dst)
				r := nfttest.In(t, top.Node, func() (Route, error) { return Lookup(Query{Src: of.src, Dst: dst}) })
				flow := nfttest.Flow{Proto: nfttest.UDP, From: top.Pod, To: top.Outside, Dst: netip.AddrPortFrom(dst, 7000)}
				seen := nfttest.MustSend(t, top, flow).Seen.Addr()
				got := ""
				if a := r.Address; a.IsValid() {
					got = a.String()
				}
				if of.want == "the same" && got != "" {
					of.want = seen.String()
				}
				if got != of.want || got != "" && got != seen.String() {
					t.Errorf("%+v: expected is %q, seen %s, want %q", r, got, seen, of.want)
				}
			}
		})
	}
}

func TestInterfaceThatDoesNotExistIsAnErrorWithItsName(t *testing.T) {
	t.Parallel()
	ns := newRouter(t, both(defaults))
	err := ns.Do(func() error {
		_, err := Lookup(Query{
			Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9"), Interface: "eth7",
		})
		return err
	})
	if !errors.Is(err, unix.ENODEV) || !strings.Contains(err.Error(), "eth7") {
		t.Error(err)
	}
}

func TestErrorsOfTheKernelAreReturned(t *testing.T) {
	t.Parallel()
	ns := newRouter(t, both(defaults))
	head := make([]byte, unix.SizeofRtMsg)
	head[0] = unix.AF_INET
	head[1] = 32
	to := netip.MustParseAddr("203.0.113.9")
	err := ns.Do(func() error {
		_, err := read("routes", func(r reader) []node.Message {
			all := r.Request(unix.RTM_GETROUTE, 0, head, netlink.Attribute{Type: unix.RTA_DST, Data: to.AsSlice()},
				netlink.Attribute{Type: unix.RTA_IP_PROTO, Data: []byte{unix.IPPROTO_SCTP}})
			if again := r.route(query{dst: to}); routeType(again) != unix.RTN_UNSPEC {
				t.Errorf("after an error: %+v", again)
			}
			return all
		})
		return err
	})
	if !errors.Is(err, unix.EOPNOTSUPP) || !strings.HasPrefix(err.Error(), "routes of this node: ") {
		t.Error(err)
	}
}

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }
