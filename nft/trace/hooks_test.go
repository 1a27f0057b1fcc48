package trace_test

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// Each packet passes its own hooks, and what is not known at one may be anything there. The
// rule is in a chain of each hook; wanted are those in which it may drop the packet.
func TestTraceFollowsTheHooksOfAPacket(t *testing.T) {
	t.Parallel()
	cali0, eth0 := routes.Interface{Name: "cali0", Index: 5}, routes.Interface{Name: "eth0", Index: 2}
	forwarded := trace.Packet{DstType: unix.RTN_UNICAST, In: cali0, Out: eth0}
	fromNode := trace.Packet{DstType: unix.RTN_UNICAST, Out: eth0, FromNode: true}
	local := trace.Packet{DstType: unix.RTN_LOCAL, In: cali0, Out: eth0}
	unknown := trace.Packet{}
	bridged := trace.Packet{DstType: unix.RTN_UNICAST, In: cali0, Out: cali0, Bridged: true}
	for _, tt := range []struct {
		rule                string
		packet              trace.Packet
		destination, source string
	}{
		{"meta l4proto tcp drop", forwarded, "pre", "pre forward post"},
		{"meta l4proto tcp drop", fromNode, "out", "out post"},
		{"meta l4proto tcp drop", local, "pre", "pre in"},
		{`oifname "eth1" drop`, forwarded, "pre", "pre"},
		{`oifname "eth1" drop`, fromNode, "", ""},
		{`oifname "eth1" drop`, local, "pre", "pre in"},
		{`oifname "eth1" drop`, unknown, "pre", "pre forward post"},
		{`iifname "cali1" drop`, forwarded, "", ""},
		{`iifname "cali1" drop`, fromNode, "", ""},
		{`iifname "cali1" drop`, unknown, "pre", "pre forward post"},
		{`iif 6 drop`, forwarded, "", ""},
		{`iif 6 drop`, fromNode, "", ""},
		{`iif 6 drop`, unknown, "pre", "pre forward post"},
		{`iifname "cali0" drop`, bridged, "pre", "pre forward"},
		{`iif 5 drop`, bridged, "pre", "pre forward"},
		{`oifname "cali0" iif != 5 drop`, bridged, "", "post"},
		{"fib daddr type local drop", unknown, "pre", "pre forward post"},
		{"fib daddr type local drop", forwarded, "", ""},
	} {
		ns, c := dialNS(t)
		text := "table inet t {\n"
		for chain, hook := range map[string]string{
			"pre": "prerouting", "in": "input", "forward": "forward", "out": "output", "post": "postrouting",
		} {
			text += "chain " + chain + " { type filter hook " + hook + " priority -150; " + tt.rule + "; }\n"
		}
		nfttest.NFT(t, ns, text+"}", "-f", "-")
		tracer := trace.New(read(t, c))
		tt.packet.Src, tt.packet.Dst = netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("203.0.113.9")
		destination, source := tracer.Trace(tt.packet)
		chains := func(x trace.Result) string {
			var names []string
			for _, f := range x.Findings {
				names = append(names, f.Chain())
			}
			return strings.Join(names, " ")
		}
		if d, s := chains(destination), chains(source); d != tt.destination || s != tt.source {
			t.Errorf("%s, %+v: %q and %q, want %q and %q", tt.rule, tt.packet, d, s, tt.destination, tt.source)
		}
	}
}

// What happens at one hook matters at the next.
func TestTraceOfSeveralHooks(t *testing.T) {
	t.Parallel()
	const off = "passes; if whether connection tracking is off, by meta l4proto tcp notrack"
	for _, tt := range []struct{ first, last, destination, source string }{
		{"priority -300; notrack", "masquerade", "passes; untracked by notrack", "passes; untracked by notrack"},
		{
			"priority -300; meta l4proto tcp notrack", "masquerade", off,
			"masquerade; " + off,
		},
		{
			"priority -300; meta l4proto tcp notrack", "", off,
			off,
		},
		{
			"priority -300; ip saddr set 192.0.2.7", "ip saddr 192.0.2.7 accept; masquerade", "passes",
			"write 192.0.2.7; left by ip saddr 192.0.2.7 accept",
		},
		{"priority -300; ip saddr set 192.0.2.7", "masquerade", "passes", "masquerade"},
		{"priority -300; drop", "masquerade", "passes; dropped by drop", "masquerade; dropped by drop"},
		{
			"priority -300; meta l4proto tcp drop", "masquerade", "passes; may be dropped by meta l4proto tcp drop",
			"masquerade; may be dropped by meta l4proto tcp drop",
		},
		{"priority -300; meta mark set 7", "meta mark 7 masquerade", "passes", "masquerade"},
		{
			"priority 0;", strings.Repeat("meta l4proto tcp masquerade; ", 1001), "passes",
			"… if meta l4proto tcp, too many rules to follow",
		},
	} {
		ns, c := dialNS(t)
		nfttest.NFT(t, ns, "table ip t {\nchain pre { type filter hook prerouting "+tt.first+"; }\n"+
			"chain post { type nat hook postrouting priority 100; "+tt.last+"; }\n}\n", "-f", "-")
		tracer := trace.New(read(t, c))
		p := trace.Packet{Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9")}
		destination, source := tracer.Trace(p)
		d, s := traced(destination, true), traced(source, false)
		if rest, long := strings.CutPrefix(tt.source, "…"); long && strings.HasSuffix(s, rest) {
			s = tt.source
		}
		if d != tt.destination || s != tt.source {
			t.Errorf("%s, then %s\n got %s, %s\nwant %s, %s", tt.first, tt.last, d, s, tt.destination, tt.source)
		}
	}
}

// Destinations are translated at the first hook of a packet, and sources at its last.
func TestTraceOfNATAtEachHook(t *testing.T) {
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip t {
		chain pre { type nat hook prerouting priority -100; dnat to 192.0.2.1; }
		chain in { type nat hook input priority 100; snat to 192.0.2.2; }
		chain out { type nat hook output priority -100; dnat to 192.0.2.3; }
		chain post { type nat hook postrouting priority 100; snat to 192.0.2.4; }
	}`, "-f", "-")
	tracer := trace.New(read(t, c))
	for want, p := range map[string]trace.Packet{
		"192.0.2.1, 192.0.2.4": {DstType: unix.RTN_UNICAST}, "192.0.2.1, 192.0.2.2": {DstType: unix.RTN_LOCAL},
		"192.0.2.3, 192.0.2.4": {DstType: unix.RTN_UNICAST, FromNode: true},
	} {
		p.Src, p.Dst = netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("203.0.113.9")
		destination, source := tracer.Trace(p)
		if got := traced(destination, true) + ", " + traced(source, false); got != want {
			t.Errorf("%+v: %s, want %s", p, got, want)
		}
	}
}

// Chains after NAT see the source that a rule certainly gave the packet, and any source if that is not certain.
func TestTraceAfterTheSourceWasTranslated(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	const (
		snat  = "snat to 192.0.2.7"
		drops = "dropped"
		may   = "dropped?"
	)
	for _, tt := range []struct{ nat, priority, late, want string }{
		{snat, "120", "ip saddr 192.0.2.7 drop", drops},
		{snat, "120", "ip saddr 10.244.1.2 drop", ""},
		{snat, "120", "ct status snat drop", drops},
		{snat, "100", "ip saddr 192.0.2.7 drop", may},
		{snat, "100", "ip saddr 10.244.1.2 drop", may},
		{snat, "99", "ip saddr 10.244.1.2 drop", drops},
		{snat, "120", "fib saddr type unicast drop", may},
		{"masquerade", "120", "ip saddr 192.0.2.1 drop", drops},
		{"snat to ip saddr", "120", "ip saddr 10.244.1.2 drop", drops},
		{"snat to ip saddr", "120", "ct status snat drop", ""},
		{"snat to 192.0.2.7-192.0.2.9", "120", "ip saddr 192.0.2.7 drop", may},
		{"meta l4proto tcp " + snat, "120", "ip saddr 192.0.2.7 drop", may},
		{"meta l4proto tcp " + snat + "; snat to 192.0.2.8", "120", "ip saddr 10.244.1.2 drop", may},
		{"counter", "120", "ip saddr 10.244.1.2 drop", drops},
		{"counter", "120", "ct status snat drop", ""},
	} {
		nfttest.NFT(t, ns, "flush ruleset; table ip t { chain nat { type nat hook postrouting priority 100; "+tt.nat+"; }; "+
			"chain late { type filter hook postrouting priority "+tt.priority+"; "+tt.late+"; }; }", "-f", "-")
		p := packet()
		p.Masqueraded = netip.MustParseAddr("192.0.2.1")
		got := ""
		for _, f := range trace.New(read(t, c)).At(p, unix.NF_INET_POST_ROUTING).Findings {
			if f.Code == trace.Drops {
				got = drops
				if !f.Sure {
					got = may
				}
			}
		}
		if got != tt.want {
			t.Errorf("%s, then at %s %s: %q, want %q", tt.nat, tt.priority, tt.late, got, tt.want)
		}
	}
}

// The set of ours by which packets from a pod to itself are recognized forgets: it is never read.
func TestPairsInOursAreThoseOfAnAddressWithItself(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip t {
		set self { type ipv4_addr . ipv4_addr; size 9; flags dynamic; }
		set other { type ipv4_addr . inet_proto; size 9; flags dynamic; }
		chain pairs { type nat hook postrouting priority 100; ip saddr . ip daddr @self masquerade; }
		chain rest { type nat hook postrouting priority 110; ip saddr . meta l4proto @other masquerade; }
	}`, "-f", "-")
	of := everything
	of.Own, of.Ours = func(nfnetlink.Chain) bool { return true }, true
	rules, err := trace.Read(c, of)
	if err != nil {
		t.Fatal(err)
	}
	for dst, want := range map[string]string{
		"10.244.1.2":  "foreign-masquerade, keeps no",
		"203.0.113.9": "foreign-masquerade?, keeps maybe",
	} {
		p := packet()
		p.Dst = netip.MustParseAddr(dst)
		if got := words(trace.New(rules).At(p, unix.NF_INET_POST_ROUTING)); got != want {
			t.Errorf("to %s: %s, want %s", dst, got, want)
		}
	}
}
