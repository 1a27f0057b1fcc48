package rule_test

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/rule"
)

// factsOf returns what others read of a rule, besides its text: for each statement the
// comparison, the translation, and what it writes.
func factsOf(r nfnetlink.Rule) string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	add("%s", rule.String(r))
	translates, masquerades := false, false
	for s := range rule.Statements(r) {
		if s.Field != "" {
			words := s.Field + " " + s.Op
			switch {
			case s.Mask == nil:
			case strings.HasPrefix(s.Field, "meta mark"), strings.HasPrefix(s.Field, "ct"):
				words = fmt.Sprintf("%s & %#x", words, binary.NativeEndian.Uint32(s.Mask))
			default:
				words = fmt.Sprintf("%s & %x", words, s.Mask)
			}
			if s.Set != "" {
				words += " @" + s.Set
			}
			if r, ok := s.Range(); ok {
				words += " " + r.String()
			}
			add("%s", words)
		}
		if n := s.NAT; n.Source || n.Destination {
			if n.Source && !translates {
				translates, masquerades = true, n.Masquerade
			}
			words := map[bool]string{true: "source", false: ""}[n.Source] + map[bool]string{true: "destination"}[n.Destination]
			if n.Masquerade {
				words += " masquerade"
			}
			if n.Family != 0 {
				words += " " + n.Family.String()
			}
			if n.To.From.IsValid() {
				words += fmt.Sprintf(" to %s-%s", n.To.From, n.To.To)
			}
			if n.ToField != "" {
				words += " to field " + n.ToField
			}
			if n.ToMap != "" {
				words += fmt.Sprintf(" & %x to map %s", n.ToMask, strings.TrimRight(n.ToMap, "0123456789"))
			}
			add("%s ports %d-%d flags %x", words, n.MinPort, n.MaxPort, n.Flags)
		}
		if m := s.NewMark; m != nil {
			add("mark & %x ^ %x ? %x", m.Keep, m.Xor, m.Unknown)
		}
		if s.Write.Field != "" {
			add("write %s %s", s.Write.Field, s.Write.To)
		}
		if rule.Untracks(s.Expr) {
			add("untracked")
		}
	}
	source, fully := facts.NAT(r)
	if source {
		add("SourceNAT %t %t", masquerades, fully)
	}
	if source != translates {
		add("one decoder says that the source is translated")
	}
	if to, ok := facts.Target(r); ok {
		add("to %s", to)
	}
	if facts.Returns(r) {
		add("returns")
	}
	if n, ok := facts.Packets(r); ok {
		add("%d packets", n)
	}
	if sets := facts.Sets(r); sets != nil {
		add("sets %q", sets)
	}
	if c := facts.Comment(r); c != "" {
		add("comment %q", c)
	}
	return strings.Join(all, "; ")
}

func checkFacts(t *testing.T, c *nfnetlink.Conn, family nfnetlink.Family, table, chain string, tests [][2]string) {
	t.Helper()
	rules, _, err := c.FirstRules(family, table, chain, func(nfnetlink.Rule) bool { return false })
	if err != nil || len(rules) != len(tests) {
		t.Fatalf("%d rules: %v", len(rules), err)
	}
	for i, r := range rules {
		if got := factsOf(r); got != tests[i][1] {
			t.Errorf("%s:\n\t%s\nwant\n\t%s", tests[i][0], got, tests[i][1])
		}
	}
}

func TestFactsOfNativeRules(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	tests := [][2]string{
		{
			"ip daddr 10.0.0.0/9",
			"meta nfproto ipv4 ip daddr 10.0.0.0/9; meta nfproto ==; ip daddr == & ff800000 10.0.0.0/9",
		},
		{
			"ip daddr 10.0.0.0/8",
			"meta nfproto ipv4 ip daddr 10.0.0.0/8; meta nfproto ==; ip daddr == 10.0.0.0/8",
		},
		{
			"ip daddr 10.0.0.1",
			"meta nfproto ipv4 ip daddr 10.0.0.1; meta nfproto ==; ip daddr == 10.0.0.1",
		},
		{
			"ip daddr != 10.0.0.0/8",
			"meta nfproto ipv4 ip daddr != 10.0.0.0/8; meta nfproto ==; ip daddr != 10.0.0.0/8",
		},
		{
			"ip saddr >= 10.0.0.1",
			"meta nfproto ipv4 ip saddr >= 10.0.0.1; meta nfproto ==; ip saddr >= 10.0.0.1-255.255.255.255",
		},
		{
			"ip saddr <= 10.0.0.1",
			"meta nfproto ipv4 ip saddr <= 10.0.0.1; meta nfproto ==; ip saddr <= 0.0.0.0-10.0.0.1",
		},
		{
			"ip saddr < 10.0.0.1",
			"meta nfproto ipv4 ip saddr < 10.0.0.1; meta nfproto ==; ip saddr <",
		},
		{
			"ip saddr > 10.0.0.1",
			"meta nfproto ipv4 ip saddr > 10.0.0.1; meta nfproto ==; ip saddr >",
		},
		{
			"ip saddr & 0.0.0.255 == 0.0.0.7",
			"meta nfproto ipv4 ip saddr & 0.0.0.255 == 0.0.0.7; meta nfproto ==; ip saddr == & 000000ff",
		},
		{
			"ip saddr 10.0.0.1-10.0.0.9",
			"meta nfproto ipv4 ip saddr >= 10.0.0.1 ip saddr <= 10.0.0.9; meta nfproto ==; ip saddr >= " +
				"10.0.0.1-255.255.255.255; ip saddr <= 0.0.0.0-10.0.0.9",
		},
		{
			"ip6 saddr fd00::/13",
			"meta nfproto ipv6 ip6 saddr fd00::/13; meta nfproto ==; " +
				"ip6 saddr == & fff80000000000000000000000000000 fd00::/13",
		},
		{
			"ip6 saddr fd00::/16",
			"meta nfproto ipv6 ip6 saddr fd00::/16; meta nfproto ==; ip6 saddr == fd00::/16",
		},
		{
			"ip6 daddr >= fd00::",
			"meta nfproto ipv6 ip6 daddr >= fd00::; meta nfproto ==; ip6 daddr >= " +
				"fd00::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
		},
		{
			"ip6 daddr <= fd00::",
			"meta nfproto ipv6 ip6 daddr <= fd00::; meta nfproto ==; ip6 daddr <= ::-fd00::",
		},
		{
			"ip daddr @nets",
			`meta nfproto ipv4 ip daddr @nets; meta nfproto ==; ip daddr == @nets; sets ["nets"]`,
		},
		{
			"ip daddr != @nets",
			`meta nfproto ipv4 ip daddr != @nets; meta nfproto ==; ip daddr != @nets; sets ["nets"]`,
		},
		{
			"ip saddr . ip daddr { 10.0.0.1 . 10.0.0.2 }",
			`meta nfproto ipv4 ip saddr . ip daddr @__set0; meta nfproto ==; ip saddr . ip daddr == @__set0; ` +
				`sets ["__set0"]`,
		},
		{
			"ip saddr . ip daddr { 10.0.0.1 . 10.0.0.2 } ip daddr . ip saddr { 10.0.0.1 . 10.0.0.2 }",
			`meta nfproto ipv4 ip saddr . ip daddr @__set1 ip daddr . ip saddr @__set2; meta nfproto ==; ` +
				`ip saddr . ip daddr == @__set1; ip daddr . ip saddr == @__set2; sets ["__set1" "__set2"]`,
		},
		{
			"ip protocol tcp",
			"meta nfproto ipv4 ip protocol tcp; meta nfproto ==; ip protocol ==",
		},
		{
			"ip ttl 4",
			"meta nfproto ipv4 @nh,64,8 0x04; meta nfproto ==; @nh,64,8 ==",
		},
		{
			"ip length 4",
			"meta nfproto ipv4 @nh,16,16 0x0004; meta nfproto ==; @nh,16,16 ==",
		},
		{
			"@nh,96,48 1",
			"@nh,96,48 0x000000000001; @nh,96,48 ==",
		},
		{
			"@nh,128,40 1",
			"@nh,128,40 0x0000000001; @nh,128,40 ==",
		},
		{
			"@th,0,32 1",
			"@th,0,32 0x00000001; @th,0,32 ==",
		},
		{
			"@th,16,16 1",
			"th dport 1; th dport ==",
		},
		{
			"@ll,96,16 1",
			"@ll,96,16 0x0001; @ll,96,16 ==",
		},
		{
			"ip6 nexthdr tcp",
			"meta nfproto ipv6 @nh,48,8 0x06; meta nfproto ==; @nh,48,8 ==",
		},
		{
			"ip6 flowlabel 1",
			"meta nfproto ipv6 @nh,8,24 & 0x0fffff == 0x000001; meta nfproto ==; @nh,8,24 == & 0fffff",
		},
		{
			"mark 5",
			"meta mark 0x5; meta mark ==",
		},
		{
			"mark > 5",
			"meta mark > 5",
		},
		{
			"mark and 0x4000 == 0x4000",
			"meta mark & 0x4000 == 0x4000; meta mark == & 0x4000",
		},
		{
			"ct state new,related",
			"ct state related,new; ct state != & 0xc",
		},
		{
			"ct state != new",
			"ct state != new; ct state !=",
		},
		{
			"ct status dnat",
			"ct status dnat; ct status != & 0x20",
		},
		{
			"ct state new counter",
			"ct state new counter; ct state != & 0x8; 0 packets",
		},
		{
			"counter packets 7 bytes 9 return",
			"counter return; returns; 7 packets",
		},
		{
			"mark set mark xor 0x4000",
			"meta mark set meta mark ^ 0x4000; mark & ffffffff ^ 4000 ? 0",
		},
		{
			"mark set mark or 0x4000",
			"meta mark set meta mark & 0xffffbfff ^ 0x4000; mark & ffffbfff ^ 4000 ? 0",
		},
		{
			"mark set mark and 0x4000",
			"meta mark set meta mark & 0x4000; mark & 4000 ^ 0 ? 0",
		},
		{
			"mark set 5",
			"meta mark set 0x5; mark & 0 ^ 5 ? 0",
		},
		{
			"mark set ct mark",
			"meta mark set ct mark; mark & 0 ^ 0 ? ffffffff",
		},
		{
			"mark set ct mark and 0xff",
			"meta mark set ct mark & 0xff; mark & 0 ^ 0 ? ff",
		},
		{
			"ct mark set mark",
			"<ct>",
		},
		{
			"ip saddr set 10.0.0.9",
			"meta nfproto ipv4 ip saddr set 10.0.0.9; meta nfproto ==; write ip saddr 10.0.0.9",
		},
		{
			"ip6 daddr set fd00::9",
			"meta nfproto ipv6 ip6 daddr set fd00::9; meta nfproto ==; write ip6 daddr fd00::9",
		},
		{
			"ip dscp set 1",
			"meta nfproto ipv4 @nh,0,16 set @nh,0,16 & 0xff03 ^ 0x0004; meta nfproto ==; write @nh,0,16 invalid IP",
		},
		{
			"tcp dport set 80",
			"meta l4proto tcp th dport set 80; meta l4proto ==; write th dport invalid IP",
		},
		{
			"masquerade",
			"masquerade; source masquerade ports 0-0 flags 0; SourceNAT true false",
		},
		{
			"masquerade fully-random",
			"masquerade fully-random; source masquerade ports 0-0 flags 10; SourceNAT true true",
		},
		{
			"masquerade random",
			"masquerade random; source masquerade ports 0-0 flags 4; SourceNAT true false",
		},
		{
			"masquerade persistent",
			"masquerade persistent; source masquerade ports 0-0 flags 8; SourceNAT true false",
		},
		{
			"tcp dport 80 masquerade to :1024",
			"meta l4proto tcp th dport 80 masquerade to :1024; meta l4proto ==; th dport ==; source masquerade ports " +
				"1024-1024 flags 2; SourceNAT true false",
		},
		{
			"tcp dport 80 masquerade to :1024-2047 fully-random",
			"meta l4proto tcp th dport 80 masquerade to :1024-2047 fully-random; meta l4proto ==; th dport ==; source " +
				"masquerade ports 1024-2047 flags 12; SourceNAT true true",
		},
		{
			"snat ip to 1.2.3.4",
			"snat ip to 1.2.3.4; source ip to 1.2.3.4-1.2.3.4 ports 0-0 flags 1; SourceNAT false false",
		},
		{
			"snat ip to 1.2.3.4-1.2.3.9",
			"snat ip to 1.2.3.4-1.2.3.9; source ip to 1.2.3.4-1.2.3.9 ports 0-0 flags 1; SourceNAT false false",
		},
		{
			"tcp dport 80 snat ip to 1.2.3.4:1024-2047",
			"meta l4proto tcp th dport 80 snat ip to 1.2.3.4:1024-2047; meta l4proto ==; th dport ==; source ip to " +
				"1.2.3.4-1.2.3.4 ports 1024-2047 flags 3; SourceNAT false false",
		},
		{
			"snat ip6 to fd00::9 fully-random",
			"snat ip6 to fd00::9 fully-random; source ip6 to fd00::9-fd00::9 ports 0-0 flags 11; SourceNAT false true",
		},
		{
			"snat ip to ip saddr map { 10.0.0.1 : 1.2.3.4 }",
			`meta nfproto ipv4 snat to ip saddr map @__map0; ` +
				`meta nfproto ==; source ip to field ip saddr &  to map __map ports 0-0 flags 1; ` +
				`SourceNAT false false; sets ["__map0"]`,
		},
		{
			"snat ip to ip saddr & 0.0.0.255 map @pods",
			`meta nfproto ipv4 snat to ip saddr & 0.0.0.255 map @pods; ` +
				`meta nfproto ==; source ip to field ip saddr & 000000ff to map pods ports 0-0 flags 1; ` +
				`SourceNAT false false; sets ["pods"]`,
		},
		{
			"snat ip to ip daddr",
			"meta nfproto ipv4 snat to ip daddr; meta nfproto ==; " +
				"source ip to field ip daddr ports 0-0 flags 1; SourceNAT " +
				"false false",
		},
		{
			"snat ip to ip saddr & 0.0.0.255",
			"meta nfproto ipv4 snat to ip saddr & 0.0.0.255; meta nfproto ==; source ip ports 0-0 flags 1; " +
				"SourceNAT false " +
				"false",
		},
		{
			"meta nfproto ipv4 th dport 80 snat ip to ip saddr",
			"meta nfproto ipv4 th dport 80 snat to ip saddr; meta nfproto ==; th dport ==; " +
				"source ip to field ip saddr ports " +
				"0-0 flags 1; SourceNAT false false",
		},
		{
			"jump sub",
			"jump sub; to sub",
		},
		{
			"goto sub",
			"goto sub; to sub",
		},
		{
			"oifname vmap @jumps",
			`oifname vmap @jumps; sets ["jumps"]`,
		},
		{
			"return comment \"a word\"",
			`return comment "a word"; returns; comment "a word"`,
		},
		{
			"accept",
			"accept",
		},
		{
			"counter name ip saddr map @counters",
			`meta nfproto ipv4 object of map @counters; meta nfproto ==; sets ["counters"]`,
		},
		{
			"counter name seen",
			"counter name seen",
		},
		{
			"add @learned { ip saddr }",
			`meta nfproto ipv4 add @learned { … }; meta nfproto ==; sets ["learned"]`,
		},
		{
			"fib daddr type local",
			"fib daddr type local; fib daddr type ==",
		},
		{
			"iif lo oifname \"eth*\"",
			`iif "lo" oifname "eth*"; iif ==; oifname ==`,
		},
		{
			"limit rate 5/second",
			"limit rate 5/second",
		},
		{
			"numgen inc mod 10 < 5",
			"numgen inc mod 10 < 5",
		},
		{
			"log mark 7",
			"log meta mark 0x7; meta mark ==",
		},
		{
			"meta nfproto ipv6 meta l4proto udp",
			"meta nfproto ipv6 meta l4proto udp; meta nfproto ==; meta l4proto ==",
		},
	}
	var script strings.Builder
	script.WriteString(`table inet t {
		set nets { type ipv4_addr; flags interval; }
		set learned { type ipv4_addr; flags dynamic; }
		map jumps { type ifname : verdict; }
		map pods { type ipv4_addr : ipv4_addr; }
		map counters { type ipv4_addr : counter; }
		counter seen { }
		chain sub { }
		chain post { type nat hook postrouting priority 100;
`)
	for _, test := range tests {
		script.WriteString(test[0] + "\n")
	}
	script.WriteString("}\n}\n")
	nfttest.NFT(t, ns, script.String(), "-f", "-")
	checkFacts(t, c, nfnetlink.Inet, "t", "post", tests)

	tests = [][2]string{
		{
			"redirect to :8080",
			"meta l4proto tcp redirect to :8080; meta l4proto ==; destination ports 8080-8080 flags 2",
		},
		{
			"dnat to 10.0.0.2",
			"meta l4proto tcp dnat to 10.0.0.2; meta l4proto ==; destination ip to 10.0.0.2-10.0.0.2 ports 0-0 flags 1",
		},
		{
			"dnat to 10.0.0.2-10.0.0.3",
			"meta l4proto tcp dnat to 10.0.0.2-10.0.0.3; meta l4proto ==; " +
				"destination ip to 10.0.0.2-10.0.0.3 ports 0-0 flags 1",
		},
		{
			"ip daddr 10.0.0.2",
			"ip daddr 10.0.0.2; ip daddr == 10.0.0.2",
		},
		{
			"@nh,64,128 1",
			"@nh,64,128 0x00000000000000000000000000000001; @nh,64,128 ==",
		},
		{
			"@nh,192,128 1",
			"@nh,192,128 0x00000000000000000000000000000001; @nh,192,128 ==",
		},
		{
			"notrack",
			"notrack; untracked",
		},
		{
			"fib daddr . iif oif lo",
			`fib daddr . iif oif "lo"; fib daddr . iif oif ==`,
		},
		{
			"fib daddr . iif oifname lo",
			`fib daddr . iif oifname "lo"; fib daddr . iif oifname ==`,
		},
	}
	script.Reset()
	script.WriteString("table ip t { chain pre { type nat hook prerouting priority -100; meta l4proto tcp return;\n")
	for _, test := range tests[:3] {
		script.WriteString("meta l4proto tcp " + test[0] + "\n")
	}
	for _, test := range tests[3:6] {
		script.WriteString(test[0] + "\n")
	}
	script.WriteString("}\nchain raw { type filter hook prerouting priority -300; notrack; " +
		"fib daddr . iif oif lo; fib " +
		"daddr . iif oifname lo; }\n}\n")
	nfttest.NFT(t, ns, script.String(), "-f", "-")
	checkFacts(t, c, nfnetlink.IPv4, "t", "pre", append([][2]string{{
		"meta l4proto tcp return", "meta l4proto tcp return; meta l4proto ==; returns",
	}}, tests[:6]...))
	checkFacts(t, c, nfnetlink.IPv4, "t", "raw", tests[6:])

	nfttest.NFT(t, ns, "table ip6 t { chain c { ip6 saddr fd00::1; @nh,72,8 6; @nh,96,32 1; @nh,128,32 1; }; }",
		"-f", "-")
	checkFacts(t, c, nfnetlink.IPv6, "t", "c", [][2]string{
		{
			"ip6 saddr fd00::1",
			"ip6 saddr fd00::1; ip6 saddr == fd00::1",
		},
		{
			"@nh,72,8",
			"@nh,72,8 0x06; @nh,72,8 ==",
		},
		{
			"@nh,96,32",
			"@nh,96,32 0x00000001; @nh,96,32 ==",
		},
		{
			"@nh,128,32",
			"@nh,128,32 0x00000001; @nh,128,32 ==",
		},
	})
}

func TestFactsOfXTablesRules(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore")
	ns, c := dialNS(t)
	load := func(program, table string, tests [][2]string) {
		t.Helper()
		var script strings.Builder
		fmt.Fprintf(&script, "*%s\n", table)
		for _, test := range tests {
			fmt.Fprintf(&script, "-A PREROUTING %s\n", test[0])
		}
		script.WriteString("COMMIT\n")
		nfttest.Run(t, ns, script.String(), program)
	}
	raw := [][2]string{
		{
			"-j NOTRACK",
			"counter -j CT <...>; untracked; 0 packets",
		},
		{
			"-j CT --notrack",
			"counter -j CT <...>; untracked; 0 packets",
		},
		{
			"-j CT --zone 5",
			"counter -j CT <...>; 0 packets",
		},
	}
	load("iptables-nft-restore", "raw", raw)
	checkFacts(t, c, nfnetlink.IPv4, "raw", "PREROUTING", raw)
	mangle := [][2]string{
		{
			"-j MARK --set-xmark 0x4000/0xff00",
			"counter -j MARK --set-xmark 0x4000/0xff00; mark & ffff00ff ^ 4000 ? 0; 0 packets",
		},
		{
			"-j MARK --or-mark 0x10",
			"counter -j MARK --set-xmark 0x10/0x10; mark & ffffffef ^ 10 ? 0; 0 packets",
		},
		{
			"-j CONNMARK --restore-mark",
			"counter -j CONNMARK <...>; mark & 0 ^ 0 ? ffffffff; 0 packets",
		},
		{
			"-j CONNMARK --restore-mark --nfmask 0xff --ctmask 0xff",
			"counter -j CONNMARK <...>; mark & ffffff00 ^ 0 ? ff; 0 packets",
		},
		{
			"-j CONNMARK --save-mark",
			"counter -j CONNMARK <...>; 0 packets",
		},
		{
			"-j CONNMARK --set-mark 5",
			"counter -j CONNMARK <...>; 0 packets",
		},
		{
			"-m addrtype --dst-type LOCAL",
			"-m addrtype --dst-type LOCAL counter; fib daddr type ==; 0 packets",
		},
		{
			"-m addrtype ! --src-type LOCAL",
			"-m addrtype ! --src-type LOCAL counter; fib saddr type !=; 0 packets",
		},
		{
			"-m addrtype --src-type LOCAL,UNICAST",
			"-m addrtype --src-type UNICAST,LOCAL counter; 0 packets",
		},
		{
			"-m addrtype --src-type LOCAL --dst-type LOCAL",
			"-m addrtype --src-type LOCAL --dst-type LOCAL counter; 0 packets",
		},
		{
			"-m addrtype --src-type LOCAL --limit-iface-in",
			"-m addrtype --src-type LOCAL --limit-iface-in counter; 0 packets",
		},
		{
			"-m mark --mark 0x4000/0x4000",
			"meta mark & 0x4000 == 0x4000 counter; meta mark == & 0x4000; 0 packets",
		},
		{
			"-m statistic --mode nth --every 2 --packet 0",
			"-m statistic <...> counter; 0 packets",
		},
		{
			"-m statistic --mode random ! --probability 0.25",
			"-m statistic --mode random ! --probability 0.25000000000 counter; 0 packets",
		},
		{
			"-m comment --comment word",
			`-m comment --comment "word" counter; 0 packets; comment "word"`,
		},
	}
	load("iptables-nft-restore", "mangle", mangle)
	checkFacts(t, c, nfnetlink.IPv4, "mangle", "PREROUTING", mangle)
	nat := [][2]string{
		{
			"-j DNAT --to-destination 10.0.0.2",
			"counter -j DNAT --to-destination 10.0.0.2; destination to 10.0.0.2-10.0.0.2 ports 0-0 flags 1; 0 packets",
		},
		{
			"-p tcp -j DNAT --to-destination 10.0.0.2-10.0.0.9:80-90",
			"meta l4proto tcp counter -j DNAT --to-destination 10.0.0.2-10.0.0.9:80-90; meta l4proto ==; destination to " +
				"10.0.0.2-10.0.0.9 ports 80-90 flags 3; 0 packets",
		},
		{
			"-p tcp -j REDIRECT --to-ports 80",
			"meta l4proto tcp counter -j REDIRECT --to-ports 80; meta l4proto ==; " +
				"destination ports 80-80 flags 2; 0 packets",
		},
		{
			"-j NETMAP --to 10.0.0.0/8",
			"counter -j NETMAP <...>; sourcedestination ports 0-0 flags 0; SourceNAT false false; 0 packets",
		},
	}
	load("iptables-nft-restore", "nat", nat)
	checkFacts(t, c, nfnetlink.IPv4, "nat", "PREROUTING", nat)
	six := [][2]string{
		{
			"-j DNAT --to-destination fd00::2-fd00::9",
			"counter -j DNAT --to-destination fd00::2-fd00::9; destination to fd00::2-fd00::9 ports 0-0 flags 1; 0 packets",
		},
		{
			"-p tcp -j DNAT --to-destination [fd00::2]:80",
			"meta l4proto tcp counter -j DNAT --to-destination fd00::2:80; meta l4proto ==; " +
				"destination to fd00::2-fd00::2 " +
				"ports 80-80 flags 3; 0 packets",
		},
	}
	load("ip6tables-nft-restore", "nat", six)
	checkFacts(t, c, nfnetlink.IPv6, "nat", "PREROUTING", six)
}

// Programs may use registers as nft does not.
func TestFactsOfRulesThatNFTDoesNotWrite(t *testing.T) {
	mark := &expr.Meta{Key: expr.MetaKeyMARK, Register: 1}
	bits := func(mask, xor uint32) *expr.Bitwise {
		return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: words(mask), Xor: words(xor)}
	}
	part := func(mask, xor byte) *expr.Bitwise {
		return &expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4, Mask: []byte{0, 0, 0, mask}, Xor: []byte{0, 0, 0, xor},
		}
	}
	seven := []byte{0, 0, 0, 7}
	equal := func(b []byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: b} }
	source := nfnetlink.AddressPayload(false, true)
	number := func(n uint32) *expr.Immediate { return &expr.Immediate{Register: 1, Data: words(n)} }
	setMark := &expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true}
	toMap := &expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: "m"}
	snat := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1}
	for _, tt := range []struct {
		name  string
		exprs []expr.Any
		want  string
	}{
		{"mark with inverted bits", []expr.Any{mark, bits(0xff, 5), equal(words(7))}, "meta mark & 0xff ^ 0x5 == 0x7"},
		{"constant", []expr.Any{&expr.Immediate{Register: 1, Data: seven}, equal(seven)}, "0x00000007 == 0x00000007"},
		{
			"mask of a mask",
			[]expr.Any{mark, bits(0xff, 0), bits(0xf, 0), equal(seven)},
			"<bitwise> 0x00000007; <bitwise> ==",
		},
		{"mask of a constant", []expr.Any{number(5), bits(0xf, 0), equal(seven)}, "<bitwise> 0x00000007; <bitwise> =="},
		{"nothing in the register", []expr.Any{equal(seven)}, "<register 1> 0x00000007; <register 1> =="},
		{"nothing for the mark", []expr.Any{setMark}, "meta mark set <register 1>; mark & 0 ^ 0 ? ffffffff"},
		{"constant mark", []expr.Any{number(5), setMark}, "meta mark set 0x5; mark & 0 ^ 5 ? 0"},
		{
			"inverted mark",
			[]expr.Any{mark, bits(0xff, 0xf0), setMark},
			"meta mark set meta mark & 0xff ^ 0xf0; mark & ff ^ f0 ? 0",
		},
		{
			"masked mark of something else",
			[]expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, bits(0xff, 0xf0), setMark},
			"meta mark set ct mark & 0xff ^ 0xf0; mark & 0 ^ f0 ? ff",
		},
		{
			"another register",
			[]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 2}, source, equal(seven)},
			"ip saddr 0.0.0.7; ip saddr == 0.0.0.7",
		},
		{"loaded twice", []expr.Any{mark, source, equal([]byte{10, 0, 0, 1})}, "ip saddr 10.0.0.1; ip saddr == 10.0.0.1"},
		{
			"loaded before another statement",
			[]expr.Any{source, &expr.Counter{}, &expr.Lookup{SourceRegister: 1, SetName: "s"}},
			`counter ip saddr @s; ip saddr == @s; 0 packets; sets ["s"]`,
		},
		{
			"compared twice",
			[]expr.Any{source, equal([]byte{10}), equal([]byte{10, 1})},
			"ip saddr 10.0.0.0/8 ip saddr 10.1.0.0/16; ip saddr == 10.0.0.0/8; ip saddr == 10.1.0.0/16",
		},
		{
			"forgotten",
			[]expr.Any{source, &expr.Socket{Register: 1}, equal([]byte{10, 0, 0, 1})},
			"<socket> <register 1> 0x0a000001; <register 1> ==",
		},
		{
			"range",
			[]expr.Any{mark, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: words(1), ToData: words(2)}},
			"meta mark 0x1-0x2",
		},
		{
			"not a range",
			[]expr.Any{mark, &expr.Range{Op: expr.CmpOpNeq, Register: 1, FromData: words(1), ToData: words(2)}},
			"meta mark != 0x1-0x2",
		},
		{
			"from a map",
			[]expr.Any{source, toMap, snat},
			`snat to ip saddr map @m; source ip to field ip saddr &  to map m ports 0-0 flags 0; ` +
				`SourceNAT false false; sets ["m"]`,
		},
		{
			"from a map, inverted",
			[]expr.Any{source, part(0xff, 1), toMap, snat},
			`snat to ip saddr & 0.0.0.255 ^ 0.0.0.1 map @m; source ip ports 0-0 flags 0; SourceNAT false false; sets ["m"]`,
		},
		{
			"from a map, and masked",
			[]expr.Any{source, toMap, part(0xff, 0), snat},
			`snat to ip saddr map @m & 0x000000ff; source ip ports 0-0 flags 0; SourceNAT false false; sets ["m"]`,
		},
		{
			"to its own address",
			[]expr.Any{source, snat},
			"snat to ip saddr; source ip to field ip saddr ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to a part of it",
			[]expr.Any{source, part(0xff, 0), snat},
			"snat to ip saddr & 0.0.0.255; source ip ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to it with other bits",
			[]expr.Any{source, part(0xff, 1), snat},
			"snat to ip saddr & 0.0.0.255 ^ 0.0.0.1; source ip ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to a constant",
			[]expr.Any{&expr.Immediate{Register: 1, Data: []byte{10, 0, 0, 1}}, snat},
			"snat to 10.0.0.1; source ip to 10.0.0.1-10.0.0.1 ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"to ports that are not constant",
			[]expr.Any{mark, &expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 1}},
			"masquerade to :meta mark; source masquerade ports 0-0 flags 0; SourceNAT true false",
		},
		{"to a short port", []expr.Any{
			&expr.Immediate{Register: 1, Data: []byte{7}}, &expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 1},
		}, "masquerade to :7; source masquerade ports 0-0 flags 0; SourceNAT true false"},
		{"written in part", []expr.Any{
			&expr.Immediate{Register: 1, Data: []byte{10, 0}},
			&expr.Payload{
				OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 2,
			},
		}, "ip saddr set 0x0a00; write ip saddr invalid IP"},
		{"drop", []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}, "drop"},
		{
			"jump",
			[]expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "a"}, &expr.Verdict{Kind: expr.VerdictReturn}},
			"jump a return; to a; returns",
		},
		{
			"limit in bytes",
			[]expr.Any{&expr.Limit{Type: expr.LimitTypePktBytes, Rate: 5, Unit: expr.LimitTimeHour}},
			"limit rate 5 bytes/hour",
		},
		{"limit over", []expr.Any{&expr.Limit{Rate: 5, Unit: expr.LimitTimeDay, Over: true}}, "limit rate over 5/day"},
		{"quota", []expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_QUOTA, Name: "q"}}, "quota name q"},
	} {
		r := nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, tt.exprs...)}
		if got := factsOf(r); got != tt.want {
			t.Errorf("%s:\n\t%s\nwant\n\t%s", tt.name, got, tt.want)
		}
	}
}

// xt is a match or target of xtables with parameters.
func xt(kind, name string, revision uint32, info []byte) nfnetlink.Rule {
	var attrs []byte
	add := func(typ uint16, data []byte) {
		attrs = binary.NativeEndian.AppendUint16(attrs, uint16(4+len(data)))
		attrs = binary.NativeEndian.AppendUint16(attrs, typ)
		attrs = append(append(attrs, data...), make([]byte, -len(data)&3)...)
	}
	add(1, append([]byte(name), 0))
	add(2, binary.BigEndian.AppendUint32(nil, revision))
	add(3, info)
	return nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: []nfnetlink.Expr{{Name: kind, Attrs: attrs}}}
}

// words returns numbers of 32 bits in the machine's order.
func words(all ...uint32) (b []byte) {
	for _, n := range all {
		b = binary.NativeEndian.AppendUint32(b, n)
	}
	return b
}

// The size of the parameters distinguishes their revisions. Those of other sizes are not read.
func TestParametersAreReadByTheirSize(t *testing.T) {
	invert, none := []byte{1}, []byte{0}
	with := func(b []byte, more ...byte) []byte { return append(b, more...) }
	connmark := func(size, at int) []byte {
		b := with(words(0, 0, 0xff), make([]byte, size-12)...)
		if at < size {
			b[at] = 2
		}
		return b
	}
	for _, tt := range []struct {
		name string
		rule nfnetlink.Rule
		want string
	}{
		{"mark", xt("match", "mark", 1, with(words(5, 0xff), invert...)), "-m mark ! --mark 0x5/0xff; meta mark != & 0xff"},
		{"mark", xt("match", "mark", 1, with(words(5, 0xff), none...)), "-m mark --mark 0x5/0xff; meta mark == & 0xff"},
		{"long mark", xt("match", "mark", 1, words(5, 0xff, 0, 0)), "-m mark --mark 0x5/0xff; meta mark == & 0xff"},
		{"longer mark", xt("match", "mark", 1, with(words(5, 0xff, 0, 0), 0)), "-m mark <...>"},
		{"short mark", xt("match", "mark", 1, words(5, 0xff)), "-m mark <...>"},
		{"another match", xt("match", "other", 1, words(5, 0xff, 0)), "-m other <...>"},
		{"another match of that size", xt("match", "other", 1, words(4, 0)), "-m other <...>"},
		{"short addrtype", xt("match", "addrtype", 0, words(4)), "-m addrtype <...>"},
		{"long addrtype", xt("match", "addrtype", 2, words(4, 0, 0)), "-m addrtype <...>"},
		{
			"statistic", xt("match", "statistic", 0, words(0, 1<<30)),
			"-m statistic --mode random --probability 0.50000000000",
		},
		{"short statistic", xt("match", "statistic", 0, words(0)), "-m statistic <...>"},
		{"MARK", xt("target", "MARK", 2, words(5, 0xff)), "-j MARK --set-xmark 0x5/0xff; mark & ffffff00 ^ 5 ? 0"},
		{"short MARK", xt("target", "MARK", 1, words(5)), "-j MARK <...>; mark & 0 ^ 0 ? ffffffff"},
		{"another target", xt("target", "OTHER", 2, words(5, 0xff)), "-j OTHER <...>"},
		{"CONNMARK", xt("target", "CONNMARK", 1, connmark(16, 12)), "-j CONNMARK <...>; mark & ffffff00 ^ 0 ? ff"},
		{"short CONNMARK", xt("target", "CONNMARK", 1, connmark(12, 12)), "-j CONNMARK <...>"},
		{
			"CONNMARK, revision 2", xt("target", "CONNMARK", 2, connmark(16, 14)),
			"-j CONNMARK <...>; mark & ffffff00 ^ 0 ? ff",
		},
		{"CONNMARK, revision 2, which shifts", xt("target", "CONNMARK", 2, connmark(16, 12)), "-j CONNMARK <...>"},
		{"like CONNMARK", xt("target", "OTHER", 1, connmark(16, 12)), "-j OTHER <...>"},
		{"short CT", xt("target", "CT", 0, []byte{1}), "-j CT <...>"},
		{"CT", xt("target", "CT", 0, binary.NativeEndian.AppendUint16(nil, 1)), "-j CT <...>; untracked"},
		{"NOTRACK", xt("target", "NOTRACK", 0, nil), "-j NOTRACK <...>; untracked"},
		{"a match of that name", xt("match", "NOTRACK", 0, nil), "-m NOTRACK <...>"},
		{"like CT", xt("target", "OTHER", 0, []byte{1, 1}), "-j OTHER <...>"},
		{
			"short SNAT", xt("target", "SNAT", 0, make([]byte, 19)),
			"-j SNAT <...>; source ports 0-0 flags 0; SourceNAT false false",
		},
		{
			"SNAT", xt("target", "SNAT", 0, with(words(1, 1), 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9)),
			"-j SNAT --to-source 10.0.0.1-10.0.0.2; source to 10.0.0.1-10.0.0.2 ports 0-0 flags 1; SourceNAT false false",
		},
		{
			"SNAT with ports", xt("target", "SNAT", 0, with(words(1, 2), 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9)),
			"-j SNAT --to-source 7-9; source ports 7-9 flags 2; SourceNAT false false",
		},
	} {
		if got := factsOf(tt.rule); got != tt.want {
			t.Errorf("%s:\n\t%s\nwant\n\t%s", tt.name, got, tt.want)
		}
	}
}

func TestUserDataIsReadAsFarAsItIsValid(t *testing.T) {
	for _, tt := range []struct{ data, want string }{
		{"", ""},
		{"\x00", ""},
		{"\x00\x02ab", "ab"},
		{"\x05\x00", ""},
		{"\x00\x03ab\x00", "ab"},
		{"\x00\x03ab", ""},
		{"\x05\x01x\x00\x02ab", "ab"},
		{"\x05\x00\x00\x02ab", "ab"},
		{"\x05\x09x\x00\x02ab", ""},
		{"\x00\x01a\x00\x01b", "a"},
	} {
		if got := facts.UserData([]byte(tt.data), 0); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.data, got, tt.want)
		}
	}
}
