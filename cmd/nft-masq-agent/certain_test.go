package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// othersDecide is a CNI plugin's masquerade, a rule that keeps the source address, and a zone, as
// programs other than kube-proxy install them.
const othersDecide = `table inet others {
	chain raw {
		type filter hook prerouting priority raw
		ip daddr { 10.9.0.7, 203.0.113.7 } ct zone set 7
		ip saddr { 10.9.0.7, 203.0.113.7 } ct zone set 7
		ip6 daddr { fd00:9::7, 2001:db8:1::7 } ct zone set 7
		ip6 saddr { fd00:9::7, 2001:db8:1::7 } ct zone set 7
	}
	chain post {
		type nat hook postrouting priority srcnat - 10
		ip saddr 10.244.0.0/16 ip daddr 192.168.0.0/16 masquerade
		ip daddr 198.51.100.0/24 snat ip to ip saddr
		ip6 saddr fd00:10:244::/48 ip6 daddr fd00:8::/64 masquerade
		ip6 daddr 2001:db8:2::/64 snat ip6 to ip6 saddr
	}
}
`

// install installs them, and rules in the table that mode iptables-nft shares.
func (n trafficNode) install(rules string) {
	n.t.Helper()
	nfttest.NFT(n.t, n.top.Node, rules, "-f", "-")
	for program, dst := range map[string]string{"iptables-nft": "198.19.0.0/16", "ip6tables-nft": "2001:db8:3::/64"} {
		nfttest.Run(n.t, n.top.Node, "", program, "-t", "nat", "-A", "POSTROUTING", "-d", dst, "-j", "ACCEPT")
	}
}

// The policies before and after a change.
const (
	beforeChange = "nonMasqueradeCIDRs: [203.0.113.0/24, 192.168.0.0/16, '2001:db8:1::/64', 'fd00:8::/64']\n"
	afterChange  = "nonMasqueradeCIDRs: [10.0.0.0/8, 192.168.0.0/16, 'fd00::/8']\n"
)

// Destinations of connections that are opened before the change.
var (
	certain = []string{"10.9.0.9", "203.0.113.9", "[fd00:9::9]", "[2001:db8:1::9]"}
	spared  = []string{
		"192.168.9.9", "[fd00:8::9]", // translated by others
		"198.51.100.9", "[2001:db8:2::9]", // exempted by others
		"198.19.0.9", "[2001:db8:3::9]", // accepted by others, in mode iptables-nft above our jump
		"10.9.0.7", "203.0.113.7", "[fd00:9::7]", "[2001:db8:1::7]", // in a zone
	}
)

// openBeforeChange opens connections of UDP and TCP. It returns the destinations of those that
// are certainly stale after the change, and of the others.
func (n trafficNode) openBeforeChange() (stale, others []string) {
	n.t.Helper()
	port := 5000
	for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
		open := func(hosts []string) (all []string) {
			for _, host := range hosts {
				port++
				dst := fmt.Sprint(host, ":", port)
				n.open(proto, dst)
				all = append(all, dst)
			}
			return all
		}
		stale, others = append(stale, open(certain)...), append(others, open(spared)...)
	}
	slices.Sort(stale)
	slices.Sort(others)
	return stale, others
}

func (n trafficNode) destinations(args ...string) (all []string) {
	n.t.Helper()
	for _, c := range n.connections(args...) {
		all = append(all, c.Destination)
	}
	slices.Sort(all)
	return all
}

func TestOnlyWhatIsCertainlyStaleIsListedAndDeleted(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newTrafficNode(t)
		n.install(othersDecide)
		n.enforce(beforeChange, "--enable-ipv6", flag)
		stale, others := n.openBeforeChange()
		n.enforce(afterChange, "--enable-ipv6", flag)
		if got := n.destinations("--stale"); !slices.Equal(got, stale) {
			t.Errorf("stale: %q, want %q", got, stale)
		}
		if r, _ := n.status(*n.flags...); r.Stale == nil || r.Stale.Count != len(stale) {
			t.Errorf("status: %+v, want %d", r.Stale, len(stale))
		}
		if got := n.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *n.flags)...); got.code != exitDone {
			t.Errorf("%+v", got)
		}
		if got := n.destinations(); !slices.Equal(got, others) {
			t.Errorf("left: %q, want %q", got, others)
		}
	})
}

func TestDaemonDeletesOnlyWhatIsCertainlyStale(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	n.install(othersDecide)
	n.swap("staleConnections: all\n" + beforeChange)
	d := n.start("--resync-interval=3600", "--enable-ipv6")
	d.began(wants(t, beforeChange, "--enable-ipv6"))
	stale, others := n.openBeforeChange()
	n.swap("staleConnections: all\n" + afterChange)
	if line := d.await("stale_connections_deleting"); line["connections"] != float64(len(stale)) {
		t.Errorf("at the start: %v", line)
	}
	line := d.await("stale_connections_deleted")
	if line["connections"] != float64(len(stale)) || line["complete"] != true {
		t.Errorf("at the end: %v", line)
	}
	if got := n.destinations(); !slices.Equal(got, others) {
		t.Errorf("left: %q, want %q", got, others)
	}
}

// Nothing is certain next to rules that are not read.
func TestConnectionsThatLegacyIPTablesOrUnreadRulesMayHaveDecidedAreSpared(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy")
	legacy := func(program, dst string) func(trafficNode) {
		return func(n trafficNode) {
			nfttest.Run(n.t, n.top.Node, "", program, "-t", "nat", "-A", "POSTROUTING", "-d", dst, "-j", "MASQUERADE")
		}
	}
	unused := func(n trafficNode) { nfttest.Run(n.t, n.top.Node, "", "iptables-legacy", "-t", "nat", "-S") }
	many := func(n trafficNode) {
		rules := strings.Repeat("ip saddr 172.17.0.1 masquerade\n", 60_001)
		chain := "chain post { type nat hook postrouting priority srcnat\n" + rules + "}\n"
		nfttest.NFT(n.t, n.top.Node, "table inet many { "+chain+"}", "-f", "-")
	}
	for name, tt := range map[string]struct {
		install    func(trafficNode)
		ipv4, ipv6 bool // whether those are spared
		says       string
	}{
		"none":           {install: func(trafficNode) {}},
		"a table unused": {install: unused},
		"IPv4": {
			install: legacy("iptables-legacy", "192.168.9.9"), ipv4: true,
			says: "iptables-legacy -t nat -S lists rules of other programs",
		},
		"IPv6": {
			install: legacy("ip6tables-legacy", "fd00:8::9"), ipv6: true,
			says: "ip6tables-legacy -t nat -S lists rules of other programs",
		},
		"too many rules": {install: many, ipv4: true, ipv6: true, says: "other programs have too many rules"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
				n := newTrafficNode(t)
				tt.install(n)
				n.enforce(beforeChange, "--enable-ipv6", flag)
				for _, host := range certain {
					n.open(nfttest.UDP, host+":5000")
				}
				n.enforce(afterChange, "--enable-ipv6", flag)
				var want []string
				for _, host := range certain {
					if host[0] == '[' && tt.ipv6 || host[0] != '[' && tt.ipv4 {
						want = append(want, host+":5000")
					}
				}
				slices.Sort(want)
				got := n.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *n.flags)...)
				says := unwrap(got.stderr)
				named := strings.Contains(says, tt.says) && strings.Contains(says, "not certain") == (tt.says != "")
				if got.code != exitDone || !named {
					t.Errorf("%+v", got)
				}
				if left := n.destinations(); !slices.Equal(left, want) {
					t.Errorf("left: %q, want %q", left, want)
				}
				r, _ := n.status(*n.flags...)
				if r.Stale == nil || r.Stale.Count != 0 ||
					!strings.Contains(strings.Join(problems(r, "stale-unknown"), "\n"), tt.says) {
					t.Errorf("status: %+v", r)
				}
			})
		})
	}
}

// Bits 0x4000 and 0x2000 are kube-proxy's and portmap's, and are not set without DNAT. Other
// programs have marks with the same bits.
func TestConnectionsThatAnotherMarkMayHaveDecidedAreSpared(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	masquerading := []struct {
		mark    int // that another program sets; 0: it does not, and the connection is from before
		compare string
	}{
		{51820, "51820"},
		{0x2000, "0x2000"},
		{0x4000, "0x4000"},
		{0xffff, "0xffff"},
		{0x6000, "& 0x6000 == 0x6000"},
		{0x6000, "& 0xe000 == 0x6000"},
		{0x2000, "& 0xffff == 0x2000"},
		{0x4000, "& 0xffff0000 == 0"},
		{0x2000, "& 0x6000 != 0"},
		{0x2000, "{ 0x2000, 0x4000 }"},
		{0, "& 0x4000 == 0x4000"},
		{0, "& 0x2000 == 0x2000"},
		{0, "& 0x4000 != 0"},
	}
	n := newTrafficNode(t)
	var set, rules, stale, others strings.Builder
	for i, m := range masquerading {
		for _, family := range []string{"ip", "ip6"} {
			dst := fmt.Sprintf("10.9.1.%d", i+1)
			if family == "ip6" {
				dst = fmt.Sprintf("fd00:9:1::%x", i+1)
			}
			if m.mark != 0 {
				fmt.Fprintf(&set, "%s daddr %s meta mark set %#x\n", family, dst, m.mark)
				fmt.Fprintln(&others, netip.AddrPortFrom(netip.MustParseAddr(dst), 5000))
			} else {
				fmt.Fprintln(&stale, netip.AddrPortFrom(netip.MustParseAddr(dst), 5000))
			}
			fmt.Fprintf(&rules, "%s daddr %s meta mark %s masquerade\n", family, dst, m.compare)
		}
	}
	const before, after = "nonMasqueradeCIDRs: []\n", "nonMasqueradeCIDRs: [10.0.0.0/8, 'fd00::/8']\n"
	open := func(destinations string) (all []string) {
		all = strings.Fields(destinations)
		for _, dst := range all {
			if !n.open(nfttest.UDP, dst).Masqueraded() {
				t.Errorf("%s is not masqueraded", dst)
			}
		}
		slices.Sort(all)
		return all
	}
	n.enforce(before, "--enable-ipv6")
	want := open(stale.String())
	n.nft("table inet others { chain pre { type filter hook prerouting priority mangle\n" + set.String() +
		"}\nchain post { type nat hook postrouting priority srcnat\n" + rules.String() + "}\n}\n")
	n.enforce(after, "--enable-ipv6")
	left := open(others.String())
	if got := n.destinations("--stale"); !slices.Equal(got, want) {
		t.Errorf("stale: %q, want %q", got, want)
	}
	if got := n.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *n.flags)...); got.code != exitDone {
		t.Errorf("%+v", got)
	}
	if got := n.destinations(); !slices.Equal(got, left) {
		t.Errorf("left: %q, want %q", got, left)
	}
}

// A bridge tracks connections that it forwards, and they pass no chain that translates. Where
// both ends are behind one interface, it may be that bridge.
func TestConnectionsBehindOneInterfaceAreSpared(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	n.nft("table inet t { chain c { type filter hook forward priority 0; ct state new accept; }; }") // it tracks
	var all []string
	for _, dst := range []string{"203.0.113.9:5000", "[2001:db8:1::9]:5000"} {
		n.open(nfttest.UDP, dst)
		all = append(all, dst)
	}
	n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8, 'fd00::/8']\n", "--enable-ipv6")
	for _, tt := range []struct {
		name, route4, route6 string
		spared               bool
	}{
		{"as the packets came", "", "", false},
		{"a route to the destination", "203.0.113.9/32 dev pod0", "2001:db8:1::9/128 dev pod0", true},
		{"a route to its network", "203.0.113.0/24 dev pod0", "2001:db8:1::/64 dev pod0", true},
		{"a route to another destination", "203.0.113.8/32 dev pod0", "2001:db8:1::8/128 dev pod0", false},
		{"one of two next hops", "203.0.113.9/32 nexthop dev eth0 nexthop dev pod0", "2001:db8:1::9/128 dev pod0", true},
	} {
		route := func(do string) {
			if tt.route4 != "" {
				nfttest.Run(t, n.NS, "route "+do+" "+tt.route4+"\nroute "+do+" "+tt.route6+"\n", "ip", "-batch", "-")
			}
		}
		route("add")
		want := all
		if tt.spared {
			want = nil
		}
		if got := n.destinations("--stale"); !slices.Equal(got, want) {
			t.Errorf("%s: stale: %q, want %q", tt.name, got, want)
		}
		if tt.spared {
			if got := n.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *n.flags)...); got.code != exitDone {
				t.Errorf("%s: %+v", tt.name, got)
			}
		}
		route("del")
	}
	if got := n.destinations(); !slices.Equal(got, all) {
		t.Errorf("left: %q, want %q", got, all)
	}
}

// A pod that is started again may have the address and the ports of the previous one, and
// another interface. An entry does not show by which one its packets came.
func TestConnectionsOfAPodsPredecessorAreNotJudgedByItsInterface(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, masqueraded := range []bool{false, true} { // the previous pod
		n := newTrafficNode(t)
		text := "masqueradeSrcInterfaces: [%s]\nnonMasqueradeCIDRs: [10.0.0.0/8]\n"
		was, is := "pod0", "next0"
		if !masqueraded {
			was, is = is, was
		}
		n.enforce(fmt.Sprintf(text, was))
		open := func(port int) (all []string) {
			for i := range 3 {
				*n.port = 100 // the same source port each time
				dst := fmt.Sprintf("203.0.113.%d:%d", 9+i, port)
				if n.open(nfttest.UDP, dst).Masqueraded() != (was == "pod0") {
					t.Errorf("%s: masqueraded is not %t", dst, was == "pod0")
				}
				all = append(all, dst)
			}
			return all
		}
		all := open(5000)
		was = is
		n.enforce(fmt.Sprintf(text, is)) // as if the same interface had the other name
		all = append(all, open(5001)...)
		slices.Sort(all)
		if got := n.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *n.flags)...); got.code != exitDone {
			t.Errorf("%+v", got)
		}
		if got := n.destinations(); !slices.Equal(got, all) {
			t.Errorf("left: %q, want %q", got, all)
		}
	}
}

// A VRF has local routes of its own, where "fib daddr type local" does not look. What goes to
// such an address of the node passes no chain that translates.
func TestConnectionsWithAnAddressOfTheNodeInAnotherTableAreSpared(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	nfttest.Run(t, n.NS, `address add 198.51.100.33/32 dev eth0
address add 2001:db8:33::1/128 dev eth0 nodad
`, "ip", "-batch", "-")
	// The kernel adds the route to an address of IPv6 later.
	for end := time.Now().Add(timeout); ; {
		text := nfttest.Run(t, n.NS, "", "ip", "-6", "route", "show", "table", "local")
		if strings.Contains(text, "2001:db8:33::1") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("no local route:\n%s", text)
		}
	}
	nfttest.Run(t, n.NS, `route del local 198.51.100.33 dev eth0 table local
route del local 2001:db8:33::1 dev eth0 table local
route add local 198.51.100.33 dev eth0 table 77
route add local 2001:db8:33::1 dev eth0 table 77
`, "ip", "-batch", "-")
	for _, family := range []string{"-4", "-6"} {
		nfttest.Run(t, n.NS, "", "ip", family, "rule", "add", "iif", "pod0", "lookup", "77", "priority", "10")
	}
	n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8, 'fd00::/8']\n", "--enable-ipv6")
	for _, dst := range []string{"198.51.100.33:5000", "[2001:db8:33::1]:5000"} {
		nfttest.MustSend(t, n.top, nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Node, Dst: netip.MustParseAddrPort(dst),
		})
	}
	if got := n.destinations("--stale"); len(got) > 0 || len(n.destinations()) != 2 {
		t.Errorf("stale: %q of %q", got, n.destinations())
	}
}
