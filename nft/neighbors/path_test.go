package neighbors

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
)

// A Service of two endpoints, of which one marks the packet for masquerading, and what else packets meet.
const service = `table ip t {
	set large { type ipv4_addr; elements = { MANY 203.0.113.10 }; }
	chain marking { meta mark set meta mark or 0x4000; meta l4proto tcp dnat to 10.0.0.9:80; }
	chain pre { type nat hook prerouting priority -100
		ip daddr 10.96.0.1 numgen inc mod 3 vmap { 0 : goto marking, 1 : goto same, 2 : goto other }
		ip daddr 10.96.0.2 dnat to 10.0.0.8-10.0.0.9
		ip daddr 10.96.0.3 ct mark 1 dnat to 10.0.0.9
		ip daddr 10.96.0.4 meta l4proto tcp redirect
	}
	chain same { dnat to 10.0.0.8; }
	chain other { dnat to 10.0.0.8; }
	chain early { type filter hook prerouting priority -150
		ip daddr 203.0.113.7 meta mark set 7
		ip daddr @large meta mark set 9
		ip daddr 203.0.113.8 ct mark 1 meta mark set 8
		ip daddr 10.96.0.5 ip daddr set 10.0.0.9
	}
	chain raw { type filter hook prerouting priority -300; ip saddr 10.244.1.3 notrack; }
	chain out { type filter hook output priority -150; ip daddr 203.0.113.7 meta mark set 7; }
	chain post { type nat hook postrouting priority 100
		meta mark and 0x4000 == 0x4000 masquerade
		tcp dport 81 masquerade
	}
}
table netdev d { chain c { type filter hook ingress device lo priority 0; counter; }; }`

// pathsOf formats paths: where each leaves by, whether our policy masquerades it, what rules do, and what chooses it.
func pathsOf(all []Path) string {
	var words []string
	for _, p := range all {
		by, itself := p.Source.Seen()
		on := strings.ReplaceAll(strings.Join(p.Depends, ", "), "whether the bridge br0 passes it on", "passes")
		text := fmt.Sprint(p.Out(), "/", p.AddressOf(), " ", p.Wanted, " ", len(by), " ", itself, " ", on)
		words = append(words, strings.TrimSpace(text))
	}
	return strings.Join(words, "; ")
}

func TestPathsOfAConnection(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	many := ""
	for i := range 10_000 { // too many to read
		many += fmt.Sprintf("10.9.%d.%d,", i/250, i%250)
	}
	nfttest.NFT(t, ns, strings.Replace(service, "MANY", many, 1), "-f", "-")
	want := exempting("10.0.0.0/8")
	tracer, err := survey(t, open(t, ns), want).Tracer(t.Context(), want)
	must(t, err)
	if got := fmt.Sprint(tracer.Devices()); got != "[netdev d c]" {
		t.Errorf("not read are %s", got)
	}
	tracer.Protocol, tracer.Port = unix.IPPROTO_TCP, 81
	cali, bridge := routes.Interface{Name: "cali0", Index: 5}, routes.Interface{Name: "br0", Index: 6, Kind: "bridge"}
	eth := routes.Route{Type: unix.RTN_UNICAST, Interface: routes.Interface{Name: "eth0", Index: 2}, AddressOf: "lo"}
	pod := routes.Route{Type: unix.RTN_UNICAST, Interface: cali}
	across := routes.Route{Type: unix.RTN_UNICAST, Interface: bridge}
	node := routes.Route{Type: unix.RTN_LOCAL, Interface: cali}
	const one, none = "eth0/lo false 1 false", "eth0/lo false 0 true"
	for _, tt := range []struct {
		src, dst  string
		back, way routes.Route
		paths     string
		endpoints string // each with its port and path
		mark      string // when the packet is routed, and what is open
	}{
		{"10.244.1.2", "203.0.113.9", pod, eth, "eth0/lo true 1 false", "", "0 0"},
		{"10.244.1.2", "203.0.113.7", pod, eth, "eth0/lo true 1 false", "", "7 0"},
		{"10.244.1.2", "203.0.113.8", pod, eth, "eth0/lo true 1 false", "", "0 8"},
		{"10.244.1.2", "203.0.113.10", pod, eth, "eth0/lo true 1 false", "", "9 0"},
		{"192.0.2.1", "203.0.113.7", node, eth, "eth0/lo true 1 false", "", "0 7"},
		{"192.0.2.1", "203.0.113.8", node, eth, "eth0/lo true 1 false", "", "0 0"},
		{"", "203.0.113.7", pod, eth, "eth0/lo true 1 true", "", "0 0"},
		{"10.244.1.2", "10.0.0.7", pod, eth, one, "", "0 0"},
		{"10.244.1.2", "192.0.2.1", pod, node, "cali0/cali0 false 0 true", "", "0 0"},
		{"10.244.1.2", "10.96.0.1", pod, eth, "eth0/lo false 2 false", "9:80 eth0/lo false 1 true / 8:0 " +
			"eth0/lo false 2 false", "0 16384"},
		{"10.244.1.3", "10.96.0.1", pod, eth, none, "", "0 0"}, // it is not tracked
		{"10.244.1.2", "10.96.0.2", pod, eth, one, "", "0 0"},  // to one of several addresses
		{"10.244.1.2", "10.96.0.3", pod, eth, one, "", "0 0"},  // perhaps
		{"10.244.1.2", "10.96.0.4", pod, eth, one, "", "0 0"},  // to an address of the node
		{"10.244.1.2", "10.96.0.5", pod, eth, one, "", "0 0"},  // without NAT
		{"10.244.1.2", "203.0.113.9", across, across, "br0/br0 true 1 false; br0/br0 true 1 false passes through these " +
			"rules, which then see no iifname; br0/br0 true 0 true passes without these rules", "", "0 0"},
		{"10.244.1.2", "203.0.113.9", across, eth, "eth0/lo true 1 false", "", "0 0"},
		{"10.244.1.2", "203.0.113.9", pod, pod, "cali0/cali0 true 1 false", "", "0 0"},
	} {
		src, _ := netip.ParseAddr(tt.src)
		dst, to := netip.MustParseAddr(tt.dst), routes.Routes{Back: tt.back, Ways: []routes.Route{tt.way}}
		all := tracer.Trace(src, dst, to)
		var endpoints []string
		for _, f := range all[0].Endpoints() {
			last := f.To[0].From.As4()[3]
			endpoints = append(endpoints, fmt.Sprint(last, ":", f.Port, " ", pathsOf(tracer.Onward(all[0], f, to))))
		}
		mark, open := tracer.Mark(src, dst, to)
		got := []string{pathsOf(all), strings.Join(endpoints, " / "), fmt.Sprint(mark, open)}
		if diff := cmp.Diff([]string{tt.paths, tt.endpoints, tt.mark}, got); diff != "" {
			t.Errorf("%s to %s (-want +got):\n%s", tt.src, tt.dst, diff)
		}
	}
}

// A conflict is named by what is reported about it, and accepted by its chain. What is link-local has no routes, so
// another packet stands for the rule.
func TestConflictsAreToldApartByWhatIsReported(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n := open(t, ns)
	n.running = func(bool) ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.244.7.7")}, nil }
	load := func(rules string) (o Others) {
		nfttest.NFT(t, ns, "flush ruleset; table ip t { chain a { type nat hook postrouting priority 99;\n"+rules+
			"\n}; }", "-f", "-")
		return others(t, n, exempting(defaultExempt))
	}
	const rule = "ip daddr { 169.254.0.0/16, 172.16.0.0/12 } counter "
	seed := maphash.MakeSeed()
	first := load(rule + "masquerade")
	c := first.Conflicts[0]
	if n := c.Packets(); n == nil || *n != 0 || c.Src.String() != "10.244.7.7" || c.Dst.IsLinkLocalUnicast() ||
		c.Base.Rules != nil { // they would stay in memory
		t.Errorf("%v packets, %s", n, c.Why())
	}
	for other, same := range map[string]bool{
		"ip daddr 192.0.2.1 accept\n" + rule + "masquerade": true, rule + "snat to 192.0.2.1": false,
		rule + "meta l4proto tcp masquerade": false,
	} {
		if got := load(other).Conflicts[0]; (got.Hash(seed) == c.Hash(seed)) != same {
			t.Errorf("%s: the same is %t", other, !same)
		}
	}
	o := load("ip daddr 172.16.0.1 masquerade\nip daddr 203.0.113.1 snat to 192.0.2.1")
	o.Accept([]string{"ip t b", "ip6 t a"})
	if len(o.Conflicts) != 1 || len(o.Overruled) != 1 || len(o.Accepted) != 0 || o.Conflicts[0].Packets() != nil {
		t.Errorf("other chains are accepted: %+v", o)
	}
	o.Accept([]string{"ip t b", "ip t a"})
	if len(o.Conflicts) != 0 || len(o.Overruled) != 0 || len(o.Accepted) != 2 {
		t.Errorf("the chain is not accepted: %+v", o)
	}
}

// A policy enforces its exemptions on interfaces that the node has, and only against chains that come after it.
func TestEnforcedExemptionsOverrideWhatComesLater(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	n := open(t, ns)
	want := nft.Compile(config.Config{
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8"), Enforce: &config.Position{},
		MasqueradeSrcInterfaces: []config.Interface{{Name: "cali*"}},
	}, nft.Options{Layout: native.Layout{}})
	for _, tt := range []struct {
		priority   int32
		name       string
		overridden bool
	}{
		{nft.EnforcePriority + 1, "cali1", true},
		{nft.EnforcePriority, "cali1", false},
		{nft.EnforcePriority + 1, "eth0", false},
	} {
		nfttest.NFT(t, ns, fmt.Sprintf("flush ruleset; table ip t { chain c { type nat hook postrouting priority %d; "+
			"masquerade; }; }", tt.priority), "-f", "-")
		n.interfaces = func() ([]routes.Interface, error) { return []routes.Interface{{Name: tt.name}}, nil }
		o := others(t, n, want)
		if over := len(o.Overridden) == 1; over != tt.overridden || (len(o.Conflicts) == 1) == over {
			t.Errorf("%+v: conflicts %v, overridden %v", tt, o.Conflicts, o.Overridden)
		}
	}
}

// What a bridge has both ends of may never have passed rules: that is an interface with the longest route to both.
func TestAddressesBehindOneInterface(t *testing.T) {
	var networks []routes.Network
	for prefix, names := range map[string]string{
		"0.0.0.0/0": "eth0", "10.244.0.0/16": "eth1", "10.244.1.0/24": "cni0", "10.244.1.9/32": "cali9",
		"10.9.0.0/16": "eth1 eth2", "fd00::/64": "cni0",
	} {
		for name := range strings.FieldsSeq(names) {
			networks = append(networks, routes.Network{Prefix: netip.MustParsePrefix(prefix), Interface: name})
		}
	}
	behind := oneInterface(networks)
	for pair, want := range map[[2]string]bool{
		{"10.244.1.2", "10.244.1.3"}: true, {"10.244.1.2", "10.244.1.9"}: false, {"10.244.1.2", "10.244.2.1"}: false,
		{"10.244.2.1", "10.9.0.1"}: true, {"10.9.0.1", "10.9.0.2"}: true, {"10.244.1.2", "192.0.2.1"}: false,
		{"192.0.2.1", "203.0.113.9"}: true, {"fd00::1", "fd00::2"}: true, {"fd00::1", "fd01::2"}: false,
		{"fd01::1", "fd01::2"}: false, {"fd00::1", "10.244.1.2"}: true,
	} {
		if got := behind(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1])); got != want {
			t.Errorf("%q: %t", pair, got)
		}
	}
}
