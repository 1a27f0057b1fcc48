package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
)

// sent is the source from which a packet of the pod arrives, and whether none does.
func (n trafficNode) sent(src, dst netip.Addr, port uint16) (seen netip.Addr, lost bool) {
	n.t.Helper()
	s, err := nfttest.Send(nfttest.Flow{
		Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Src: netip.AddrPortFrom(src, 0), Foreign: true,
		Dst: netip.AddrPortFrom(dst, port), Timeout: 150 * time.Millisecond, // if it comes later, less is tested
	})
	if err != nil && !errors.Is(err, nfttest.ErrNotSeen) {
		n.t.Fatal(err)
	}
	return s.Seen.Addr(), err != nil
}

// contradicts says how an explanation and what the far end sees of a packet differ; "" if they do not.
func contradicts(x answer.Explanation, seen netip.Addr, lost bool) string {
	mayDrop := slices.ContainsFunc(x.Notes, func(p config.Problem) bool { return p.ID == "may-drop" })
	possible := strings.Join(x.Possible, "\n")
	switch code := x.Why.Code; {
	case code == "dropped" || code == "rejected" || code == "no-route":
		if !lost {
			return "it arrives from " + seen.String()
		}
	case strings.HasPrefix(x.Headline, "unknown: "):
	case lost && !mayDrop && !(code == "unknown" && strings.Contains(possible, "nothing")):
		return "it does not arrive"
	case lost, code == "translated-first":
	case code == "unknown" && !strings.Contains(possible, seen.String()) && !strings.Contains(possible, " not known") &&
		!strings.Contains(possible, "one of "), code != "unknown" && x.Sees != seen.String():
		return "it arrives from " + seen.String()
	}
	return ""
}

// asked compares explain with two packets to a destination.
func (n trafficNode) asked(name string, src, dst netip.Addr, port uint16) {
	n.t.Helper()
	var x answer.Explanation
	n.here(&x, "explain", dst.String(), "--from", src.String(), "--config", n.path)
	for range 2 {
		seen, lost := n.sent(src, dst, port)
		if wrong := contradicts(x, seen, lost); wrong != "" {
			n.t.Errorf("%s: %s: %s %q %q %v", name, wrong, x.Why.Code, x.Headline, x.Possible, x.Notes)
			return
		}
	}
}

// Next to rules that decide in all ways, explain says what the far end sees.
func TestTheFarEndSeesWhatExplainSaysNextToEachRule(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	const enforce = "enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [10.244.0.0/16]\n"
	for i, tt := range []struct{ name, config, rules, dst string }{
		{
			"ct state new in raw", "",
			"chain c { type filter hook prerouting priority raw; ct state new drop; }", "203.0.113.9",
		},
		{
			"ct state invalid in raw", "",
			"chain c { type filter hook prerouting priority raw; ct state invalid drop; }", "203.0.113.9",
		},
		{
			"ct state new notrack in raw", "",
			"chain c { type filter hook prerouting priority raw; ct state new notrack; }", "203.0.113.9",
		},
		{
			"ct status in raw", "",
			"chain c { type filter hook prerouting priority raw; ct status != dnat drop; }", "203.0.113.9",
		},
		{
			"saddr rewritten, enforced", enforce,
			"chain c { type filter hook prerouting priority raw; ip saddr set 10.244.1.77; }", "10.9.0.9",
		},
		{
			"saddr rewritten, kept", "",
			"chain c { type filter hook prerouting priority raw; ip saddr set 10.244.1.77; }; " +
				"chain d { type nat hook postrouting priority 90; snat to ip saddr; }", "203.0.113.9",
		},
		{
			"leak guard by saddr", "",
			"chain c { type filter hook postrouting priority 120; ip saddr 10.244.0.0/16 drop; }", "203.0.113.9",
		},
		{
			"leak guard by status", "",
			"chain c { type filter hook postrouting priority 120; ct status & snat == 0 drop; }", "203.0.113.9",
		},
		{
			"leak guard by status 2", "",
			"chain c { type filter hook postrouting priority 120; ct status snat drop; }", "203.0.113.9",
		},
		{
			"guard accepts node", "",
			"chain c { type filter hook postrouting priority 120; policy drop; " +
				"ip saddr 192.0.2.1 accept; }", "203.0.113.9",
		},
		{
			"guard accepts node, exempt", "",
			"chain c { type filter hook postrouting priority 120; policy drop; " +
				"ip saddr 192.0.2.1 accept; }", "10.9.0.9",
		},
		{
			"write half of saddr", "",
			"chain c { type filter hook postrouting priority 120; @nh,112,16 set 0x0163; }", "10.9.0.9",
		},
		{
			"write last octet", "",
			"chain c { type filter hook postrouting priority 120; @nh,120,8 set 0x63; }", "10.9.0.9",
		},
		{
			"write half of daddr", "",
			"chain c { type filter hook prerouting priority -150; @nh,144,16 set 0x0163; }", "10.9.0.9",
		},
		{
			"rewritten then matched in one chain", "",
			"chain c { type filter hook prerouting priority raw; ip saddr set 10.244.1.77; " +
				"ip saddr 10.244.1.77 drop; }", "203.0.113.9",
		},
		{
			"add then lookup", "",
			"set s { type ipv4_addr; flags timeout; }; " +
				"chain a { type filter hook prerouting priority -150; add @s { ip saddr timeout 1h }; }; " +
				"chain b { type nat hook postrouting priority 90; ip saddr @s masquerade; }", "10.9.0.9",
		},
		{
			"add then lookup, plain", "",
			"set s { type ipv4_addr; }; chain a { type filter hook prerouting priority -150; " +
				"add @s { ip saddr }; }; chain b { type nat hook postrouting priority 90; " +
				"ip saddr @s masquerade; }", "10.9.0.9",
		},
		{
			"dnat then mark", "",
			"chain a { type nat hook prerouting priority -100; ip daddr 10.96.0.10 dnat to 10.9.0.9; }; " +
				"chain b { type filter hook prerouting priority -90; meta mark set 0x80; }; " +
				"chain d { type nat hook postrouting priority 90; meta mark 0x80 masquerade; }", "10.96.0.10",
		},
		{
			"dnat then drop in prerouting", "",
			"chain a { type nat hook prerouting priority -100; ip daddr 10.96.0.10 dnat to 10.9.0.9; }; " +
				"chain b { type filter hook prerouting priority 0; ip daddr 10.9.0.9 drop; }", "10.96.0.10",
		},
		{
			"dnat then filter on service", "",
			"chain a { type nat hook prerouting priority -100; ip daddr 10.96.0.10 dnat to 10.9.0.9; }; " +
				"chain b { type filter hook prerouting priority 0; ip daddr 10.96.0.10 drop; }", "10.96.0.10",
		},
		{
			"ct original saddr", "",
			"chain c { type nat hook postrouting priority 90; " +
				"ct original ip saddr 10.244.1.2 masquerade; }", "10.9.0.9",
		},
		{
			"vmap concat interval", "",
			"map m { type ipv4_addr . ipv4_addr : verdict; flags interval; " +
				"elements = { 10.244.0.0/16 . 10.9.0.0/16 : jump x }; }; chain x { masquerade; }; " +
				"chain c { type nat hook postrouting priority 90; ip saddr . ip daddr vmap @m; }", "10.9.0.9",
		},
		{
			"snat prefix", "",
			"chain c { type nat hook postrouting priority 90; " +
				"snat ip prefix to ip saddr map { 10.244.1.0/24 : 198.51.100.0/24 }; }", "10.9.0.9",
		},
		{
			"snat concat key", "",
			"chain c { type nat hook postrouting priority 90; " +
				"snat ip to ip saddr . ip daddr map { 10.244.1.2 . 10.9.0.9 : 198.51.100.7 }; }", "10.9.0.9",
		},
		{
			"snat numgen map", "",
			"chain c { type nat hook postrouting priority 90; " +
				"snat ip to numgen inc mod 2 map { 0 : 198.51.100.7, 1 : 198.51.100.8 }; }", "10.9.0.9",
		},
		{
			"snat jhash map", "",
			"chain c { type nat hook postrouting priority 90; " +
				"snat ip to jhash ip saddr mod 2 map { 0 : 198.51.100.7, 1 : 198.51.100.8 }; }", "10.9.0.9",
		},
		{
			"mark ct restore", "",
			"chain a { type filter hook prerouting priority -150; ct mark set 0x9; }; " +
				"chain b { type filter hook forward priority 0; meta mark set ct mark; }; " +
				"chain c { type nat hook postrouting priority 90; meta mark 9 masquerade; }", "10.9.0.9",
		},
		{
			"ct mark direct", "",
			"chain a { type filter hook prerouting priority -150; ct mark set 0x9; }; " +
				"chain c { type nat hook postrouting priority 90; ct mark 9 masquerade; }", "10.9.0.9",
		},
		{"ct mark zero", "", "chain c { type nat hook postrouting priority 90; ct mark 0 masquerade; }", "10.9.0.9"},
		{"ct mark raw", "", "chain c { type filter hook prerouting priority raw; ct mark 0 drop; }", "203.0.113.9"},
		{
			"filter postrouting at 100", "",
			"chain a { type filter hook postrouting priority 100; meta mark set 1; }; " +
				"chain b { type nat hook postrouting priority 120; meta mark 1 masquerade; }", "10.9.0.9",
		},
		{
			"mark then mask", "",
			"chain a { type filter hook forward priority 0; meta mark set 0xff00; " +
				"meta mark set meta mark & 0x0f00 | 0x1; }; chain b { type nat hook postrouting priority 90; " +
				"meta mark 0xf01 masquerade; }", "10.9.0.9",
		},
		{
			"mark by map", "",
			"chain a { type filter hook forward priority 0; meta mark set ip daddr map { 10.9.0.9 : 5 }; " +
				"}; chain b { type nat hook postrouting priority 90; meta mark 5 masquerade; }", "10.9.0.9",
		},
		{
			"meta mark interval set", "",
			"chain a { type filter hook forward priority 0; meta mark set 5; }; " +
				"chain b { type nat hook postrouting priority 90; meta mark { 2-7 } masquerade; }", "10.9.0.9",
		},
		{
			"mark at an equal priority, perhaps seen", "",
			"chain a { type filter hook prerouting priority -150; meta mark set 7; }; " +
				"chain b { type filter hook prerouting priority -150; meta mark 7 meta mark set 8; }; " +
				"chain c { type nat hook postrouting priority 90; meta mark 8 masquerade; }", "10.9.0.9",
		},
		{
			"kube-proxy's mark at an equal priority, perhaps seen", "",
			"chain a { type filter hook forward priority 0; meta mark & 0x4000 == 0x4000 drop; }; " +
				"chain b { type filter hook forward priority 0; meta mark set meta mark | 0x4000; }", "10.9.0.9",
		},
		{
			"marks of two chains at an equal priority", "",
			"chain a { type filter hook forward priority 0; meta mark set 5; }; " +
				"chain b { type filter hook forward priority 0; meta mark set 6; }; " +
				"chain c { type nat hook postrouting priority 90; meta mark 6 masquerade; }", "10.9.0.9",
		},
		{
			"zone before notrack", "",
			"chain c { type filter hook prerouting priority raw; ct zone set 5; notrack; }", "203.0.113.9",
		},
		{
			"timeout before notrack", "",
			"ct timeout t { protocol udp; l3proto ip; policy = { unreplied : 30 }; }; " +
				"chain c { type filter hook prerouting priority raw; ct timeout set \"t\"; notrack; }", "203.0.113.9",
		},
		{
			"zone before ct state", "",
			"chain c { type filter hook prerouting priority raw; ct zone set 5; ct state invalid drop; }", "203.0.113.9",
		},
		{
			"dnat of a protocol", "",
			"chain a { type nat hook prerouting priority -100; meta l4proto udp dnat to 10.244.1.1; }", "10.9.0.9",
		},
		{
			"dnat of another protocol", "",
			"chain a { type nat hook prerouting priority -100; meta l4proto tcp dnat to 10.244.1.1; }", "10.9.0.9",
		},
		{
			"iifname wildcard set", "",
			"chain b { type nat hook postrouting priority 90; iifname { \"pod*\", \"x\" } masquerade; }", "10.9.0.9",
		},
		{
			"oifname in raw", "",
			"chain b { type filter hook prerouting priority raw; oifname != \"eth0\" drop; }", "10.9.0.9",
		},
		{
			"iifname . saddr", "",
			"chain b { type nat hook postrouting priority 90; " +
				"iifname . ip saddr { \"pod0\" . 10.244.1.2 } masquerade; }", "10.9.0.9",
		},
		{
			"fib oif", "",
			"chain b { type filter hook prerouting priority raw; fib saddr . iif oif missing drop; }", "10.9.0.9",
		},
		{
			"goto return", "",
			"chain y { ip daddr 10.9.0.9 return; drop; }; chain x { goto y; drop; }; " +
				"chain b { type filter hook forward priority 0; jump x; ip daddr 10.9.0.9 drop; }", "10.9.0.9",
		},
		{
			"named counter map", "",
			"counter k { }; chain b { type filter hook forward priority 0; " +
				"counter name ip daddr map { 10.9.0.9 : \"k\" }; }", "10.9.0.9",
		},
		{
			"continue", "",
			"chain b { type nat hook postrouting priority 90; " +
				"ip daddr vmap { 10.9.0.9 : continue, * : drop }; masquerade; }", "10.9.0.9",
		},
		{
			"bits of saddr", "",
			"chain b { type nat hook postrouting priority 90; ip saddr & 0.0.0.3 == 0.0.0.2 masquerade; }", "10.9.0.9",
		},
		{
			"bits of saddr xor", "",
			"chain b { type nat hook postrouting priority 90; " +
				"ip saddr & 0.0.0.255 ^ 0.0.0.1 == 0.0.0.3 masquerade; }", "10.9.0.9",
		},
		{
			"masked set", "",
			"chain b { type nat hook postrouting priority 90; " +
				"ip saddr & 255.255.255.0 { 10.244.1.0 } masquerade; }", "10.9.0.9",
		},
		{
			"saddr wider payload", "",
			"chain b { type nat hook postrouting priority 90; @nh,96,64 0x0af401020a090009 masquerade; }", "10.9.0.9",
		},
		{
			"saddr set then nat", "",
			"chain a { type filter hook forward priority 0; ip saddr set 10.244.1.77; }; " +
				"chain b { type nat hook postrouting priority 90; ip saddr 10.244.1.77 snat to 198.51.100.7; " +
				"}", "10.9.0.9",
		},
		{
			"saddr set in forward then exempt by source", "nonMasqueradeSrcCIDRs: [10.244.1.77/32]\n",
			"chain a { type filter hook forward priority 0; ip saddr set 10.244.1.77; }", "203.0.113.9",
		},
		{
			"daddr set in forward", "",
			"chain a { type filter hook forward priority 0; ip daddr set 203.0.113.9; }", "10.9.0.9",
		},
		{
			"snat to own source const", "",
			"chain b { type nat hook postrouting priority 90; snat to 10.244.1.2; }", "203.0.113.9",
		},
		{
			"output nat ignored", "",
			"chain b { type nat hook output priority -100; dnat to 10.9.0.9; }", "203.0.113.9",
		},
		{"notrack at -200", "", "chain b { type filter hook prerouting priority -200; notrack; }", "203.0.113.9"},
		{
			"filter nat prio equal mask", "",
			"chain b { type filter hook postrouting priority 100; ip saddr 10.244.1.2 drop; }", "203.0.113.9",
		},
		{
			"filter postrouting 101 by saddr", "",
			"chain b { type filter hook postrouting priority 101; ip saddr 10.244.1.2 drop; }", "203.0.113.9",
		},
		{
			"filter postrouting 99 by saddr", "",
			"chain b { type filter hook postrouting priority 99; ip saddr 10.244.1.2 drop; }", "203.0.113.9",
		},
	} {
		nfttest.NFT(t, n.top.Node, "", "flush", "ruleset")
		n.enforce(tt.config)
		if _, err := n.top.Node.Output("table ip x { "+tt.rules+"; }", "nft", "-f", "-"); err != nil {
			if strings.Contains(err.Error(), "Invalid argument") || strings.Contains(err.Error(), "not supported") {
				continue // the kernel is older than the rule
			}
			t.Fatalf("%s: %v", tt.name, err)
		}
		n.asked(tt.name, n.top.PodV4, netip.MustParseAddr(tt.dst), uint16(5000+i))
	}
}

// Chains at network devices are not read: explain and status name those that have rules.
func TestRulesAtDevicesAreNamed(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("")
	for i, tt := range []struct{ table, chain, name string }{
		{"netdev x", "{ type filter hook ingress device pod0 priority 0; ip daddr 203.0.113.9 drop; }", "netdev x c"},
		{"netdev x", "{ type filter hook egress device eth0 priority 0; ip daddr 203.0.113.9 drop; }", "netdev x c"},
		{"inet x", "{ type filter hook ingress device pod0 priority 0; ip daddr 203.0.113.9 drop; }", "inet x c"},
		{"netdev x", "{ type filter hook ingress device pod0 priority 0; policy drop; }", "netdev x c"},
		{"netdev x", "{ type filter hook ingress device pod0 priority 0; }", ""},
	} {
		nfttest.NFT(t, n.top.Node, "table "+tt.table+" { chain c "+tt.chain+"; }", "-f", "-")
		n.asked(tt.name, n.top.PodV4, netip.MustParseAddr("203.0.113.9"), uint16(8000+i))
		x, _ := n.explained("203.0.113.9", "--from", n.top.PodV4.String(), "--config", n.path)
		says := "unknown: rules at network devices (" + tt.name + ") decide, too"
		if named := x.Headline == says; named != (tt.name != "") {
			t.Errorf("%s %s: %s", tt.table, tt.chain, x.Headline)
		}
		status := unwrap(n.run("status", "--config", n.path).stdout)
		says = "not read: rules at network devices (" + tt.name + ")"
		if named := strings.Contains(status, says); named != (tt.name != "") {
			t.Errorf("%s %s: %s", tt.table, tt.chain, status)
		}
		nfttest.NFT(t, n.top.Node, "", "delete", "table", strings.Fields(tt.table)[0], "x")
	}
}

// Next to routing rules and routes, too.
func TestTheFarEndSeesWhatExplainSaysNextToEachRoute(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	const table100 = "ip rule del pref 100; ip route flush table 100"
	for i, tt := range []struct{ do, undo, rules, dst string }{
		{"ip rule add from 10.244.1.2 pref 100 blackhole", "ip rule del pref 100", "", "203.0.113.9"},
		{"ip rule add from 10.244.1.2 pref 100 prohibit", "ip rule del pref 100", "", "203.0.113.9"},
		{"ip rule add from 10.244.1.2 pref 100 unreachable", "ip rule del pref 100", "", "203.0.113.9"},
		{
			"ip route add blackhole default table 100; ip rule add from 10.244.1.0/24 pref 100 lookup 100", table100, "",
			"203.0.113.9",
		},
		{
			"ip route add unreachable default table 100; ip rule add iif pod0 pref 100 lookup 100", table100, "",
			"203.0.113.9",
		},
		{"ip route add blackhole 203.0.113.0/24", "ip route del blackhole 203.0.113.0/24", "", "203.0.113.9"},
		{
			"ip route add blackhole default table 100; ip rule add fwmark 7 pref 100 lookup 100", table100,
			"chain a { type filter hook prerouting priority -150; meta mark set 7; }", "203.0.113.9",
		},
		{"ip addr add 192.0.2.55/24 dev eth0", "ip addr del 192.0.2.55/24 dev eth0", "", "203.0.113.9"},
		{"ip addr add 198.51.100.55/24 dev eth0", "ip addr del 198.51.100.55/24 dev eth0", "", "203.0.113.9"},
		{
			"ip addr add 198.51.100.55/32 dev eth0; ip route add 203.0.113.9/32 via 192.0.2.100 dev eth0 src 198.51.100.55",
			"ip route del 203.0.113.9/32; ip addr del 198.51.100.55/32 dev eth0", "", "203.0.113.9",
		},
	} {
		nfttest.NFT(t, n.top.Node, "", "flush", "ruleset")
		n.enforce("")
		nfttest.Run(t, n.top.Node, "", "sh", "-ec", tt.do)
		nfttest.NFT(t, n.top.Node, "table ip x { "+tt.rules+"; }", "-f", "-")
		n.asked(tt.do, n.top.PodV4, netip.MustParseAddr(tt.dst), uint16(7000+i))
		nfttest.Run(t, n.top.Node, "", "sh", "-ec", tt.undo)
	}
}

// A connection that was opened under the policy in force is never stale, whatever other programs did to it.
func TestConnectionsOfThePolicyInForceAreNotStale(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	const enforce = "enforceNonMasquerade: true\nmasqueradeSrcCIDRs: [10.244.0.0/16]\n"
	const marks = "chain m { type filter hook %s priority mangle; meta mark set meta mark | %#x; }; chain c { type nat " +
		"hook postrouting priority 99; meta mark & %#[2]x == %#[2]x masquerade; }"
	for _, tt := range []struct{ config, rules, dst, dev string }{
		{"", "", "10.9.0.9", ""},
		{"", fmt.Sprintf(marks, "prerouting", 0x4000), "10.9.0.9", ""},
		{"", fmt.Sprintf(marks, "forward", 0x2000), "10.9.0.9", ""},
		{enforce, fmt.Sprintf(marks, "prerouting", 0x4000), "10.9.0.9", ""},
		{"", "", "255.255.255.255", "eth0"},
		{"", "", "192.0.2.255", ""},
		{
			"nonMasqueradeSrcCIDRs: [10.244.1.77/32]\n",
			"chain a { type filter hook forward priority 0; ip saddr set 10.244.1.77; }", "203.0.113.9", "",
		},
		{"", "chain c { type filter hook postrouting priority 120; @nh,112,16 set 0x0163; }", "10.9.0.9", ""},
		{"", "chain c { type filter hook postrouting priority 120; ip saddr 10.244.0.0/16 drop; }", "203.0.113.9", ""},
	} {
		n := newTrafficNode(t)
		n.enforce(tt.config)
		if tt.rules != "" {
			nfttest.NFT(t, n.top.Node, "table ip x { "+tt.rules+"; }", "-f", "-")
		}
		to := n.top.Outside
		if strings.HasSuffix(tt.dst, ".255") {
			to = n.top.Node
		}
		_, err := nfttest.Send(nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: to, Dst: netip.MustParseAddrPort(tt.dst + ":9000"), Dev: tt.dev,
			Timeout: 150 * time.Millisecond,
		})
		if err != nil && !errors.Is(err, nfttest.ErrNotSeen) {
			t.Fatal(err)
		}
		if got := n.run("connections", "--stale", "--config", n.path); strings.Contains(got.stdout, tt.dst) {
			t.Errorf("%s %q %s: %s", tt.config, tt.rules, tt.dst, got.stdout)
		}
	}
}
