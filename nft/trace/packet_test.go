package trace_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// traced formats what decides which source the far end sees, "passes" if it may be the packet's own,
// the conditions, and what else rules do.
func traced(x trace.Result, atDestination bool) string {
	var words []string
	name := func(f trace.Finding) string {
		switch {
		case f.Ends():
			return "drop"
		case f.Code == trace.Masquerades:
			return "masquerade"
		case f.Keeps:
			return "keep"
		case len(f.To) == 0:
			return "somewhere"
		case len(f.To) > 1:
			return fmt.Sprint(f.To)
		}
		return f.To[0].String()
	}
	ways, itself := x.Seen()
	if atDestination {
		itself = x.Keeps != trace.No
		ways = slices.DeleteFunc(slices.Clone(x.Findings), func(f trace.Finding) bool {
			return !f.OfDestination || f.Code == trace.Rewrites
		})
	}
	for _, f := range ways {
		text := name(f)
		if f.Code == trace.Unknown {
			text = "anything"
		}
		for word, is := range map[string]bool{"direct ": f.Direct, "write ": f.Code == trace.Rewrites} {
			if is {
				text = word + text
			}
		}
		words = append(words, text)
	}
	if itself {
		words = append(words, "passes")
	}
	if len(x.Unknown) > 0 {
		words = append(words, "if "+strings.Join(x.Unknown, ", "))
	}
	for _, f := range x.Findings {
		switch {
		case f.Code == trace.Accepts && f.Sure:
			words = append(words, "left by "+f.RuleText())
		case f.Code == trace.Untracks && f.Sure:
			words = append(words, "untracked by "+f.RuleText())
		case f.Ends() && !f.OfSource() && f.Sure:
			words = append(words, "dropped by "+f.RuleText())
		case (f.Ends() || f.Code == trace.Unknown) && !f.OfSource():
			words = append(words, "may be dropped by "+f.RuleText())
		case f.Code == trace.Rewrites && f.OfDestination:
			words = append(words, map[bool]string{true: "all "}[f.Direct || f.Sure]+"redirected to "+name(f))
		}
	}
	return strings.Join(words, "; ")
}

// The packet is sent from 10.244.1.2, received on cali0 and leaves by eth0, to 203.0.113.9;
// with IPv6 from fd00::2 to 2001:db8::9.
func TestTraceReadsEachCondition(t *testing.T) {
	t.Parallel()
	const (
		nat, passes, hit = "type nat hook postrouting priority 100;", "passes", "masquerade"
		early            = "type filter hook postrouting priority -150;"
		late             = "type filter hook postrouting priority 120;"
	)
	for _, tt := range []struct {
		rules, want string
		base        string // nat if empty
		ipv6        bool
		itself      bool // it is sent to its own source
	}{
		{rules: "", want: passes},
		{rules: "masquerade", want: hit},
		{rules: "ip daddr 203.0.113.9 masquerade", want: "direct masquerade"},
		{rules: "ip daddr 203.0.113.8 masquerade", want: passes},
		{rules: "ip daddr != 203.0.113.9 masquerade", want: passes},
		{rules: "ip daddr != 203.0.113.8 masquerade", want: hit},
		{rules: "ip daddr 203.0.113.0/24 masquerade", want: "direct masquerade"},
		{rules: "ip daddr 203.0.113.0-203.0.113.8 masquerade", want: passes},
		{rules: "ip daddr >= 203.0.113.9 masquerade", want: hit},
		{rules: "ip daddr > 203.0.113.9 masquerade", want: "passes"},
		{rules: "ip daddr < 203.0.113.9 masquerade", want: "passes"},
		{
			rules: "ip daddr & 0.0.0.255 == 0.0.0.9 masquerade",
			want:  "direct masquerade",
		},
		{rules: "ip saddr & 0.0.0.255 == 0.0.0.9 masquerade", want: "passes"},
		{rules: "ip saddr 10.244.0.0/16 masquerade", want: hit},
		{rules: "ip6 saddr fd00::2 masquerade", want: passes},
		{rules: "ip6 saddr != fd00::2 masquerade", want: passes},
		{rules: "ip6 daddr & ::ff != ::9 masquerade", want: passes},
		{rules: "ip daddr & 0.0.0.255 != 0.0.0.8 masquerade", want: passes, ipv6: true},
		{rules: "meta nfproto ipv6 masquerade", want: passes},
		{rules: "meta nfproto != ipv6 masquerade", want: hit},
		{rules: "meta protocol ip masquerade", want: hit},
		{rules: "meta protocol arp masquerade", want: passes},
		{rules: "snat ip6 to 2001:db8::77", want: passes},
		{rules: "snat ip to ip saddr", want: "keep"},
		{rules: "snat ip6 to ip6 saddr", want: "keep", ipv6: true},
		{rules: "snat ip to ip saddr", want: passes, ipv6: true},
		{rules: "ip6 saddr fd00::/8 snat ip6 to 2001:db8::77", want: "2001:db8::77", ipv6: true},
		{rules: "meta nfproto ipv4 masquerade", want: passes, ipv6: true},
		{
			rules: "ip6 daddr & ::ff == ::9 masquerade", want: "direct masquerade",
			ipv6: true,
		},
		{rules: `iifname "cali0" masquerade`, want: hit},
		{rules: `iifname "cali1" masquerade`, want: passes},
		{rules: `iifname "cali*" masquerade`, want: hit},
		{rules: `iifname "vet*" masquerade`, want: passes},
		{rules: `iifname != "cali*" masquerade`, want: passes},
		{rules: `iifname { "cali0", "cali1" } masquerade`, want: "masquerade"},
		{rules: `oifname != { "eth0", "eth1" } masquerade`, want: "passes"},
		{rules: `iif { 5, 6 } masquerade`, want: "masquerade"},
		{rules: `oif & 3 == 2 masquerade`, want: "masquerade"},
		{rules: `ip saddr & 255.255.0.0 { 10.245.0.0, 10.246.0.0 } masquerade`, want: "passes"},
		{rules: "meta mark { 5, 6 } masquerade", want: hit + `; passes; if meta mark @__set0`},
		{rules: "fib daddr type vmap { local : jump masking }", want: "passes"},
		{rules: "ip saddr . th dport vmap { 10.244.1.2 . 53 : accept }\nmasquerade", want: hit +
			"; passes; if ip saddr . th dport vmap @__map0"},
		{rules: "th dport vmap { 53 : accept, * : jump masking }", want: hit + "; passes; if th dport vmap @__map0"},
		{rules: `iifname > "cali0" masquerade`, want: hit + `; passes; if iifname > "cali0"`},
		{rules: `meta nfproto > 2 masquerade`, want: hit + `; passes; if meta nfproto > ipv4`},
		{rules: `iif 5 masquerade`, want: hit},
		{rules: `iif 6 masquerade`, want: passes},
		{rules: `oif != 2 masquerade`, want: passes},
		{rules: `oifname "eth0" masquerade`, want: hit},
		{rules: `oifname "lo" masquerade`, want: passes},
		{rules: "fib saddr type local masquerade", want: passes},
		{rules: "fib saddr type != local masquerade", want: hit},
		{rules: "fib daddr type local masquerade", want: passes},
		{rules: "fib daddr type unicast masquerade", want: hit},
		{rules: "fib daddr . oif type local masquerade", want: hit + "; passes; if fib daddr . oif type local"},
		{rules: "ct state new masquerade", want: hit},
		{rules: "ct state established,related masquerade", want: passes},
		{rules: "ct status dnat masquerade", want: passes},
		{rules: "ct status & dnat == 0 masquerade", want: hit},
		{rules: "ct mark 7 masquerade", want: hit + "; passes; if ct mark 0x7"},
		{rules: "meta mark 5 masquerade", want: hit + "; passes; if meta mark 0x5"},
		{rules: "meta mark > 5 masquerade", want: hit + "; passes; if meta mark > 5"},
		{rules: "meta mark & 0x4000 == 0x4000 masquerade", want: passes},
		{rules: "meta mark & 0x4000 != 0x4000 masquerade", want: hit},
		{rules: "meta mark & 0x20000 != 0 masquerade", want: passes},
		{rules: "meta mark set 5 meta mark 5 masquerade", want: hit},
		{rules: "meta mark set 5 meta mark 4 masquerade", want: passes},
		{rules: "meta mark set 5\nmeta mark > 5 masquerade", want: hit + "; passes; if meta mark > 5"},
		{rules: "meta mark set meta mark or 0x4000\nmeta mark & 0x4000 == 0x4000 masquerade", want: hit},
		{rules: "meta l4proto tcp meta mark set 5\nmeta mark & 0x4000 == 0 masquerade", want: hit},
		{rules: "meta l4proto tcp meta mark set 0x4000\nmeta mark & 0x4000 == 0 masquerade", want: hit +
			"; passes; if meta mark & 0x4000 == 0x0"},
		{rules: "meta l4proto tcp return\nmeta mark set 5\nmeta mark 5 masquerade", want: hit +
			"; passes; if meta l4proto tcp, meta mark 0x5"},
		{rules: "limit rate 5/second masquerade", want: hit + "; passes; if limit rate 5/second"},
		{rules: "counter name c masquerade", want: hit},
		{rules: "quota name q masquerade", want: hit + "; passes; if quota name q"},
		{rules: "log prefix \"x\" masquerade", want: hit},
		{rules: "ct mark set 1 masquerade", want: hit},
		{rules: "meta priority set 1:2 masquerade", want: hit},
		{rules: "add @seen { ip saddr } masquerade", want: "masquerade; passes; if add @seen { … }"},
		{
			rules: "add @self { ip saddr . ip saddr } ip saddr . ip daddr @self masquerade",
			want:  "masquerade; passes; if add @self { … }, ip saddr . ip daddr @self", itself: true,
		},
		{
			rules: "add @self { ip saddr . ip saddr } ip saddr . ip daddr @self masquerade",
			want:  "masquerade; passes; if add @self { … }, ip saddr . ip daddr @self",
		},
		{
			rules: "add @self { ip saddr . ip saddr } ip saddr . ip daddr != @self masquerade",
			want:  "masquerade; passes; if add @self { … }, ip saddr . ip daddr != @self", itself: true,
		},
		{
			rules: "add @seen { ip saddr } ip saddr . ip daddr @self masquerade",
			want:  "masquerade; passes; if add @seen { … }, ip saddr . ip daddr @self", itself: true,
		},
		{
			rules: "ip saddr . ip daddr @self masquerade", want: hit + "; passes; if ip saddr . ip daddr @self", itself: true,
		},
		{
			rules: "add @self { ip saddr . ip saddr } ip daddr . ip saddr @self masquerade",
			want:  "masquerade; passes; if add @self { … }, ip daddr . ip saddr @self", itself: true,
		},
		{rules: "add @seen { ip saddr limit rate 5/second } masquerade", want: hit + "; passes; if add @seen { … }"},
		{rules: "add @seen { ip saddr limit rate 5/second counter } masquerade", want: hit + "; passes; if add @seen { … }"},
		{rules: "ip daddr 203.0.113.9 accept", want: "passes; left by meta nfproto ipv4 ip daddr 203.0.113.9 accept"},
		{rules: "return\nmasquerade", want: "passes; left by return"},
		{rules: "jump accepting\nmasquerade", want: "passes; left by accept"},
		{rules: "jump returning\nmasquerade", want: hit},
		{rules: "goto returning\nmasquerade", want: passes},
		{rules: "jump masking\nsnat ip to 192.0.2.7", want: hit},
		{rules: "jump perhaps\nsnat ip to 192.0.2.7", want: "masquerade; 192.0.2.7; if meta l4proto tcp"},
		{rules: "meta l4proto tcp accept\nmasquerade", want: hit + "; passes; if meta l4proto tcp"},
		{rules: "drop", want: "drop"},
		{rules: "meta l4proto tcp drop", want: "drop; passes; if meta l4proto tcp"},
		{
			rules: "ip saddr vmap { 10.244.1.2 : accept, 10.244.1.3 : drop }\nmasquerade",
			want:  "passes; left by meta nfproto ipv4 ip saddr vmap @__map0",
		},
		{rules: "ip saddr vmap { 10.244.1.3 : drop }\nmasquerade", want: hit},
		{rules: "ip saddr vmap { 10.244.0.0/16 : goto masking, 10.245.0.0/16 : drop }", want: hit},
		{rules: "ip daddr vmap { 203.0.113.9 : jump masking }", want: "direct masquerade"},
		{rules: "ip daddr . iifname vmap { 203.0.113.9 . \"cali0\" : jump masking }", want: "direct masquerade"},
		{rules: "ip daddr . iifname vmap { 203.0.113.9 . \"cali1\" : jump masking }", want: passes},
		{
			rules: "ip daddr . th dport vmap { 203.0.113.9 . 53 : jump masking }",
			want:  "direct masquerade; passes; if ip daddr . th dport vmap @__map0",
		},
		{rules: "ip saddr vmap { 10.244.1.9 : drop, * : jump masking }", want: hit},
		{rules: "ip saddr vmap { 0.0.0.0-9.255.255.255 : drop, 10.0.0.0-255.255.255.255 : jump masking }", want: hit},
		{rules: "ip saddr vmap { 10.244.1.3-255.255.255.255 : drop }\nmasquerade", want: hit},
		{rules: "ip6 saddr vmap { fd00::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff : jump masking }", want: hit, ipv6: true},
		{
			rules: "ip saddr . ip saddr vmap { 10.244.1.2 . 10.244.1.2 : jump masking }",
			want:  "masquerade",
		},
		{
			rules: "ip daddr . ip daddr vmap { 203.0.113.9 . 203.0.113.9 : jump masking }",
			want:  "direct masquerade",
		},
		{rules: "ip6 saddr . ip6 daddr vmap { fd00::2 . 2001:db8::9 : jump masking }", want: "direct " + hit, ipv6: true},
		{rules: "ip6 saddr . ip6 daddr vmap { fd00::2 . 2001:db8::8 : jump masking }", want: passes, ipv6: true},
		{rules: "meta nfproto { ipv4, ipv6 } masquerade", want: "masquerade"},
		{rules: "ip saddr { 10.244.1.2, 10.9.9.9 } masquerade", want: hit},
		{rules: "ip saddr { 10.244.1.3, 10.9.9.9 } masquerade", want: passes},
		{rules: "ip saddr != { 10.244.1.3, 10.9.9.9 } masquerade", want: hit},
		{rules: "ip saddr { 10.244.1.2, 10.9.9.9 } masquerade", want: passes, ipv6: true},
		{rules: "ip saddr != { 10.244.1.3, 10.9.9.9 } masquerade", want: passes, ipv6: true},
		{rules: "ip saddr @limited masquerade", want: hit + "; passes; if ip saddr @limited"},
		{rules: "ip daddr @limited masquerade", want: passes},
		{
			rules: "ip saddr . ip daddr vmap { 10.244.0.0/16 . 203.0.113.0/24 : jump masking }",
			want:  "direct masquerade",
		},
		{base: "type nat hook postrouting priority 100; policy drop;", rules: "ip daddr 203.0.113.8 accept", want: "drop"},
		{base: "type nat hook postrouting priority 100; policy drop;", rules: "accept", want: "passes; left by accept"},
		{base: early, rules: "drop", want: "passes; dropped by drop"},
		{base: early, rules: "meta l4proto tcp drop", want: "passes; may be dropped by meta l4proto tcp drop"},
		{base: early, rules: "meta l4proto tcp return\ndrop", want: "passes; may be dropped by drop"},
		{base: early, rules: "ct state invalid drop", want: passes},
		{base: early, rules: "ip daddr 203.0.113.8 drop", want: passes},
		{base: early, rules: "accept\ndrop", want: passes},
		{base: early + " policy drop;", rules: "meta l4proto tcp accept", want: "passes; may be dropped by policy drop"},
		{base: early + " policy drop;", rules: "ip daddr 203.0.113.9 accept", want: passes},
		{base: early + " policy drop;", rules: "ip daddr 203.0.113.8 accept", want: "passes; dropped by policy drop"},
		{
			base: early, rules: "th dport vmap { 53 : accept, * : drop }",
			want: "passes; may be dropped by th dport vmap @__map0",
		},
		{
			base: early, rules: "th dport vmap { 53 : jump returning, * : drop }",
			want: "passes; may be dropped by th dport vmap @__map0",
		},
		{base: early, rules: "ip saddr vmap { 10.244.1.9 : accept, * : drop }", want: "passes; dropped by " +
			"meta nfproto ipv4 ip saddr vmap @__map0"},
		{base: early, rules: "notrack", want: "passes"},
		{base: "type filter hook postrouting priority -300;", rules: "notrack", want: passes},
		{base: "type filter hook postrouting priority -300;", rules: "meta l4proto tcp notrack", want: passes},
		{
			base: late, rules: "@nh,96,16 set 0xc000",
			want: "write somewhere",
		},
		{base: late, rules: "meta l4proto tcp ip daddr set 192.0.2.7", want: "passes; redirected to 192.0.2.7"},
		{base: early, rules: "ip saddr set 192.0.2.7", want: "write 192.0.2.7"},
		{base: late, rules: "ip saddr set 192.0.2.7", want: "write 192.0.2.7"},
		{base: late, rules: "ip6 saddr set 2001:db8::7", want: "write 2001:db8::7", ipv6: true},
		{base: late, rules: "ip saddr set 192.0.2.7", want: passes, ipv6: true},
		{
			base: late, rules: "meta l4proto tcp ip saddr set 192.0.2.7",
			want: "write 192.0.2.7; passes; if meta l4proto tcp",
		},
		{
			base: late, rules: "ip saddr set ip daddr",
			want: "write somewhere",
		},
		{base: late, rules: "ip dscp set cs1", want: passes},
		{base: late, rules: "ip daddr set 192.0.2.7", want: "passes; all redirected to 192.0.2.7"},
		{
			base: late, rules: "ip daddr 203.0.113.9 meta l4proto tcp ip daddr set 192.0.2.7",
			want: "passes; all redirected to 192.0.2.7",
		},
	} {
		newer := strings.Contains(tt.rules, "* :") || strings.Contains(tt.rules, "limit rate 5/second counter }")
		if newer && nfttest.KernelBefore(t, 5, 13) {
			continue // maps have no *, and elements at most one statement
		}
		ns, c := dialNS(t)
		base := tt.base
		if base == "" {
			base = nat
		}
		nfttest.NFT(t, ns, "table inet t {\ncounter c { }\nquota q { over 10 mbytes }\n"+
			"set seen { type ipv4_addr; size 9; flags dynamic; }\n"+
			"set limited { type ipv4_addr; limit rate 1/second; elements = { 10.244.1.2 limit rate 1/second }; }\n"+
			"set self { type ipv4_addr . ipv4_addr; size 9; flags dynamic; }\n"+
			"chain masking { masquerade; }\nchain perhaps { meta l4proto tcp masquerade; }\n"+
			"chain accepting { accept; }\nchain returning { return; }\nchain base { "+base+"\n"+tt.rules+"\n}\n}\n", "-f", "-")
		tracer := trace.New(read(t, c))
		p := trace.Packet{
			Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9"),
			SrcType: unix.RTN_UNICAST, DstType: unix.RTN_UNICAST, Unset: 0x20000,
			In: routes.Interface{Name: "cali0", Index: 5}, Out: routes.Interface{Name: "eth0", Index: 2},
		}
		if tt.ipv6 {
			p.Src, p.Dst = netip.MustParseAddr("fd00::2"), netip.MustParseAddr("2001:db8::9")
		}
		switch {
		case tt.itself:
			p.Dst = p.Src
		}
		if got := traced(tracer.At(p, unix.NF_INET_POST_ROUTING), false); got != tt.want {
			t.Errorf("%s %s\n got %s\nwant %s", base, tt.rules, got, tt.want)
		}
	}
}

// Chains of equal priority run in an order that the kernel does not report.
func TestTraceOfSeveralBaseChains(t *testing.T) {
	t.Parallel()
	const order = "; if which of the chains of equal priority was registered last"
	for _, tt := range []struct{ a, b, want string }{
		{"priority 100; snat to 192.0.2.1", "priority 100; snat to 192.0.2.2", "192.0.2.1; 192.0.2.2" + order},
		{"priority 100; snat to 192.0.2.1", "priority 101; snat to 192.0.2.2", "192.0.2.1"},
		{"priority 101; snat to 192.0.2.1", "priority 100; snat to 192.0.2.2", "192.0.2.2"},
		{"priority 100; snat to 192.0.2.1", "priority 100; snat to 192.0.2.1", "192.0.2.1; 192.0.2.1" + order},
		{"priority 100; snat to 192.0.2.1", "priority 100; accept", "192.0.2.1; left by accept"},
		{"priority 100; accept", "priority 110; masquerade", "masquerade; left by accept"},
		{
			"priority 100; meta mark 7 masquerade", "priority 110; snat to 192.0.2.2",
			"masquerade; 192.0.2.2; if meta mark 0x7",
		},
		{"priority 100; meta mark set 7", "priority 110; meta mark 7 masquerade", "masquerade"},
		{"priority 100; meta mark set 7", "priority 100; meta mark 7 masquerade", "masquerade; passes; if meta mark 0x7"},
		{"priority 100; meta mark 7 masquerade", "priority 100; meta mark set 7", "masquerade; passes; if meta mark 0x7"},
		{
			"priority 100; meta mark set 0x4000", "priority 100; meta mark & 0x4000 == 0x4000 masquerade",
			"masquerade; passes; if meta mark & 0x4000 == 0x4000",
		},
		{"priority 110; meta mark set 7", "priority 100; meta mark 7 masquerade", "masquerade; passes; if meta mark 0x7"},
	} {
		ns, c := dialNS(t)
		nfttest.NFT(t, ns, "table ip t {\nchain a { type nat hook postrouting "+tt.a+
			"; }\nchain b { type nat hook postrouting "+tt.b+
			"; }\nchain other { type nat hook prerouting priority 0; drop; }\n}\ntable ip6 t { chain a { type nat hook "+
			"postrouting priority 0; drop; }; }\n"+
			"table ip asleep { flags dormant; chain a { type nat hook postrouting priority 0; drop; }; }\n", "-f", "-")
		own := func(c nfnetlink.Chain) bool { return c.Name == "a" }
		of := everything
		of.Own, of.Ours = own, true
		rules, err := trace.Read(c, of)
		if err != nil {
			t.Fatal(err)
		}
		p := trace.Packet{Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9")}
		x := trace.New(rules).At(p, unix.NF_INET_POST_ROUTING)
		if got := traced(x, false); got != tt.want {
			t.Errorf("%s, %s\n got %s\nwant %s", tt.a, tt.b, got, tt.want)
		}
		for _, w := range x.Findings {
			if w.Own != (w.Chain() == "a") || w.Base.Name != w.Chain() || w.Table() != "ip t" {
				t.Errorf("%+v", w)
			}
		}
	}
}
