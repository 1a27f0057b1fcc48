package neighbors

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// kinds lists what rules do, once each.
func kinds(all []Conflict) string {
	var words []string
	for _, c := range all {
		words = append(words, c.Kind.String())
	}
	return strings.Join(words, " ")
}

// Besides NAT before this agent, these rules contradict a policy that masquerades everything but 10.0.0.0/8
// and fd00::/8, of packets that pods send on cali*. Rules for certain protocols, ports or
// marks do not.
func TestRulesThatOverrideThePolicyAreFound(t *testing.T) {
	t.Parallel()
	const (
		raw        = "type filter hook prerouting priority raw;"
		mangle     = "type filter hook prerouting priority mangle;"
		forward    = "type filter hook forward priority filter;"
		output     = "type filter hook output priority raw;"
		leaving    = "type filter hook postrouting priority mangle;"
		early      = "type filter hook postrouting priority raw;"
		untracks   = "untracks"
		writes     = "writes"
		drops      = "drops"
		translates = "translates"
		earlier    = "type nat hook postrouting priority 109;"
		later      = "type nat hook postrouting priority 111;"
		nothing    = ""
	)
	c := config.Config{
		EnableIPv6: true, MasqLinkLocal: true, MasqLinkLocalIPv6: true,
		NonMasqueradeCIDRs:      cases.CIDRs("10.0.0.0/8", "fd00::/8"),
		MasqueradeSrcInterfaces: []config.Interface{{Name: "cali*"}},
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	for _, tt := range []struct{ name, base, rules, want string }{
		{"notrack", raw, "notrack", untracks},
		{"notrack to some", raw, "ip daddr 203.0.113.0/24 notrack", untracks},
		{"notrack to the exempt", raw, "ip daddr 10.1.0.0/16 notrack", nothing},
		{"notrack from some", raw, "ip saddr 10.244.0.0/16 notrack", untracks},
		{"notrack on pods' interfaces", raw, `iifname "cali*" notrack`, untracks},
		{"notrack on one of them", raw, `iifname "cali7" notrack`, untracks},
		{"notrack on another interface", raw, `iifname "docker0" notrack`, nothing},
		{"notrack of a protocol", raw, "meta l4proto tcp notrack", nothing},
		{"notrack of a port", raw, "udp dport 53 notrack", nothing},
		{"notrack of a mark", raw, "meta mark 7 notrack", nothing},
		{"notrack after all were accepted", raw, "accept\nnotrack", nothing},
		{"notrack in a chain", raw, "jump untracking", untracks},
		{"notrack after connection tracking", mangle, "notrack", nothing},
		{"notrack of the node's packets", output, "notrack", nothing},
		{"notrack in postrouting", leaving, "notrack", nothing},
		{"source", leaving, "ip saddr set 192.0.2.7", writes},
		{"source, of some", leaving, "ip daddr 203.0.113.0/24 ip saddr set 192.0.2.7", writes},
		{"source, of the exempt", leaving, "ip daddr 10.1.0.0/16 ip saddr set 192.0.2.7", nothing},
		{"source, before connection tracking", raw, "ip saddr set 192.0.2.7", writes},
		{"source, of a protocol", leaving, "meta l4proto tcp ip saddr set 192.0.2.7", nothing},
		{"destination", leaving, "ip daddr set 192.0.2.7", nothing},
		{"another field", leaving, "ip dscp set cs1", nothing},
		{"policy", forward + " policy drop;", "", drops},
		{"policy, postrouting", leaving + " policy drop;", "counter", drops},
		{"policy, before connection tracking", raw + " policy drop;", "counter", drops},
		{"policy, and a rule that drops", forward + " policy drop;", "drop", drops},
		{"policy, and a rule that returns", leaving + " policy drop;", "ip daddr 203.0.113.0/24 return", drops},
		{"policy, and a rule that accepts", forward + " policy drop;", "ct state established accept", drops},
		{"policy, and a jump", forward + " policy drop;", "jump untracking", drops},
		{"policy, and a map", forward + " policy drop;", "ip daddr vmap { 203.0.113.9 : accept }", nothing},
		{"accepting policy", forward, "drop", nothing},
		{"NAT before this agent", earlier, "snat to 192.0.2.7", translates},
		{"NAT after it", later, "snat to 192.0.2.7", nothing},
		{"masquerading before this agent", earlier, "masquerade", nothing},
		{"notrack in postrouting, early", early, "notrack", nothing},
	} {
		for _, ipv6 := range []bool{false, true} {
			ns := nfttest.NewNS(t, "node")
			n := open(t, ns)
			apply(t, n, want)
			text := "table ip t {\nchain untracking { notrack; }\nchain base { " + tt.base + "\n" + tt.rules + "\n}\n}\n"
			if ipv6 {
				text = strings.NewReplacer(
					"table ip ", "table ip6 ", "ip daddr", "ip6 daddr", "ip saddr", "ip6 saddr", "ip dscp", "ip6 dscp",
					"203.0.113.0/24", "2001:db8::/64", "203.0.113.9", "2001:db8::9", "10.1.0.0/16", "fd00:1::/32",
					"10.244.0.0/16", "2001:db8:244::/48", "192.0.2.7", "2001:db8:9::7").Replace(text)
			}
			nfttest.NFT(t, ns, text, "-f", "-")
			o := others(t, n, want)
			if got := kinds(o.Overruled); got != tt.want || o.Unasked > 0 {
				t.Errorf("%s, IPv6 %t: %q, want %q: %v", tt.name, ipv6, got, tt.want, o.Overruled)
			}
		}
	}
}

func TestRulesThatExemptedFromOlderAgentsAreFound(t *testing.T) {
	t.Parallel()
	const (
		jump    = `-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT`
		masq    = `-A IP-MASQ-AGENT -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`
		other   = "-N OTHER\n-A POSTROUTING -j OTHER\n"
		nothing = ""
	)
	const pod, elsewhere = "-A POSTROUTING -s 10.244.7.0/24", "-A POSTROUTING -d 198.51.100.0/24"
	for _, tt := range []struct{ name, rules, want string }{
		{"accepts", "-A POSTROUTING -d 203.0.113.0/24 -j ACCEPT\n" + jump, "accepts"},
		{"returns", "-A POSTROUTING -d 203.0.113.0/24 -j RETURN\n" + jump, "accepts"},
		{"accepts after the takeover", "-A POSTROUTING -d 203.0.113.9 -j ACCEPT", "accepts"},
		{"accepts in a chain", other + "-A OTHER -d 203.0.113.0/24 -j ACCEPT\n" + jump, "accepts"},
		{"returns from a chain", other + "-A OTHER -d 203.0.113.0/24 -j RETURN\n" + jump, nothing},
		{"after the jump", jump + "\n-A POSTROUTING -d 203.0.113.0/24 -j ACCEPT", nothing},
		{"of a source", pod + " -j ACCEPT\n" + jump, "accepts"},
		{"out of an interface", "-A POSTROUTING -o wg0 -j RETURN\n" + jump, "accepts"},
		{"an exempt destination", "-A POSTROUTING -d 10.9.0.0/16 -j ACCEPT\n" + jump, nothing},
		{"all, if nothing follows", "-A POSTROUTING -j ACCEPT", nothing},
		{"what kube-proxy marked", "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j ACCEPT\n" + jump, nothing},
		{"to another address", pod + " -d 198.51.100.0/24 -j SNAT --to-source 192.0.2.7", "translates"},
		{"to the same address", pod + " -d 198.51.100.0/24 -j MASQUERADE", nothing},
		{"while the older agent decides before it", jump + "\n" + elsewhere + " -j SNAT --to-source 192.0.2.7", nothing},
		{"once it does not", elsewhere + " -j SNAT --to-source 192.0.2.7", "translates"},
	} {
		for _, mode := range cases.Modes() {
			ns := nfttest.NewNS(t, "node")
			nfttest.Run(t, ns, "*nat\n:IP-MASQ-AGENT - [0:0]\n"+masq+"\n"+tt.rules+"\nCOMMIT\n", "iptables-nft-restore",
				"--noflush")
			o := others(t, open(t, ns), cases.Load(t, "default").Compile(mode))
			alone := func(c Conflict) bool { return c.Shared != (mode == nft.ModeIPTables) }
			if got := kinds(o.Overruled); got != tt.want || slices.ContainsFunc(o.Overruled, alone) {
				t.Errorf("%s, mode %s: %q, want %q: %v", tt.name, mode, got, tt.want, o.Overruled)
			}
		}
	}
}

// Each rule is loaded for both families. A connection goes from a pod to a destination
// that the rule names, and another, the control, to one that it does not.
func TestConnectionsThatOtherRulesMayHaveTranslatedAreSpared(t *testing.T) {
	t.Parallel()
	const above, below = "@above", "@below"
	for _, tt := range []struct {
		name, at, rule string
		shared         bool // only while our chain is reached from the same base chain
		marked         bool // only if the destination was translated
		not            bool
	}{
		{name: "masquerade", at: above, rule: "ip daddr @dst masquerade"},
		{name: "masquerade after us", at: below, rule: "ip daddr @dst masquerade"},
		{name: "masquerade in another base chain", at: "@other", rule: "ip daddr @dst masquerade"},
		{name: "another address", at: above, rule: "ip daddr @dst snat to @new"},
		{name: "its own address", at: "@other", rule: "ip daddr @dst snat to ip saddr"},
		{name: "its own address after us", at: below, rule: "ip daddr @dst snat to ip saddr"},
		{name: "under a condition", at: above, rule: "ip daddr @dst meta mark 7 masquerade"},
		{name: "of another source", at: above, rule: "ip daddr @dst ip saddr @new masquerade", not: true},
		{name: "by kube-proxy", at: above, rule: "ip daddr @dst meta mark & 0x4000 == 0x4000 masquerade", marked: true},
		{name: "by portmap", at: "@other", rule: "ip daddr @dst meta mark & 0x2000 == 0x2000 masquerade", marked: true},
		{name: "not without the bit", at: above, rule: "ip daddr @dst meta mark & 0x4000 != 0 masquerade", marked: true},
		{name: "marked by wg-quick", at: above, rule: "ip daddr @dst meta mark 51820 masquerade"},
		{name: "another source without NAT", at: "@filter", rule: "ip daddr @dst ip saddr set @new"},
		{name: "another destination without NAT", at: "@filter", rule: "ip daddr @dst ip daddr set @new"},
		{name: "accept", at: above, rule: "ip daddr @dst accept", shared: true},
		{name: "accept under a condition", at: above, rule: "ip daddr @dst meta l4proto tcp accept", shared: true},
		{name: "accept in a chain", at: above, rule: "ip daddr @dst jump accepting", shared: true},
		{name: "accept by a map", at: above, rule: "ip daddr vmap { @dst : accept }", shared: true},
		{name: "return", at: above, rule: "ip daddr @dst return", shared: true},
		{name: "goto", at: above, rule: "ip daddr @dst goto returning", shared: true},
		{name: "goto by a map", at: above, rule: "ip daddr vmap { @dst : goto returning }", shared: true},
		{name: "goto from a chain", at: above, rule: "ip daddr @dst jump going", not: true},
		{name: "return from a chain", at: above, rule: "ip daddr @dst jump returning", not: true},
		{name: "drop", at: above, rule: "ip daddr @dst drop", shared: true},
		{name: "accept after us", at: below, rule: "ip daddr @dst accept", not: true},
		{name: "accept in another base chain", at: "@other", rule: "ip daddr @dst accept", not: true},
	} {
		for _, ipv6 := range []bool{false, true} {
			for _, shared := range []bool{false, true} {
				name := fmt.Sprintf("%s, IPv6 %t, shared %t", tt.name, ipv6, shared)
				src, dst, control, addr := "10.244.1.2", "203.0.113.9", "203.0.113.10", "192.0.2.7"
				if ipv6 {
					src, dst, control, addr = "fd00::2", "2001:db8::9", "2001:db8::10", "2001:db8:9::7"
				}
				ns := nfttest.NewNS(t, "node")
				rules := strings.NewReplacer("@dst", dst, "@new", addr).Replace(tt.rule)
				text := strings.ReplaceAll(`table ip nat {
					chain IP-MASQ-AGENT { counter; }
					chain accepting { accept; }
					chain returning { return; }
					chain going { goto returning; }
					chain POSTROUTING { type nat hook postrouting priority 100
						@above
						jump IP-MASQ-AGENT
						@below
					}
					chain other { type nat hook postrouting priority 90
						@other
					}
					chain filter { type filter hook forward priority 0
						@filter
					}
				}`, tt.at, rules)
				for _, at := range []string{above, below, "@other", "@filter"} {
					text = strings.ReplaceAll(text, at, "")
				}
				if ipv6 {
					text = strings.NewReplacer("ip daddr", "ip6 daddr", "ip saddr", "ip6 saddr", "table ip ",
						"table ip6 ").Replace(text)
				}
				nfttest.NFT(t, ns, text, "-f", "-")
				mode := map[bool]nft.Mode{true: nft.ModeIPTables, false: nft.ModeNFTables}[shared]
				s := survey(t, open(t, ns), cases.Load(t, "all-policies").Compile(mode))
				may := s.asker().mayTranslate
				for _, translated := range []bool{false, true} {
					want := !tt.not && (shared || !tt.shared) && (translated || !tt.marked)
					from := netip.MustParseAddr(src)
					if got := may(from, netip.MustParseAddr(dst), translated); got != want {
						t.Errorf("%s, translated %t: %t, want %t", name, translated, got, want)
					}
					if may(from, netip.MustParseAddr(control), translated) {
						t.Errorf("%s, translated %t: the control is met", name, translated)
					}
				}
			}
		}
	}
}

// What the node receives is known with and without other programs' rules.
func TestJudgesKnowWhatTheNodeReceives(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	nfttest.IP(t, ns, "addr add 192.0.2.1/24 brd 192.0.2.255 dev lo", "link add br0 type bridge", "link set br0 up",
		"addr add 198.51.100.1/24 dev br0")
	nfttest.NFT(t, ns, "table ip t { chain c { type nat hook postrouting priority 0; ip daddr 203.0.113.9 masquerade; }; "+
		"}", "-f", "-")
	s := survey(t, open(t, ns), exempting("10.0.0.0/8"))
	evidence := nfttest.In(t, ns, s.Evidence)
	for pair, want := range map[[2]string]bool{
		{"10.244.1.2", "203.0.113.9"}: true, {"10.244.1.2", "203.0.113.8"}: false,
		{"198.51.100.2", "198.51.100.3"}: true, {"198.51.100.2", "10.244.1.2"}: false, // by a bridge
	} {
		if got := evidence.Others(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1]), false); got != want {
			t.Errorf("%q: others may have translated it: %t", pair, got)
		}
	}
	candidates := func() (*conntrack.Judge, error) { return Candidates(s.Want.Policy) }
	for _, judge := range []func() (*conntrack.Judge, error){s.Judge, candidates} {
		j := nfttest.In(t, ns, judge)
		if !slices.Contains(j.Local, netip.MustParsePrefix("192.0.2.1/32")) ||
			!slices.Contains(j.Delivered, netip.MustParsePrefix("192.0.2.255/32")) {
			t.Errorf("the node has %v and receives %v", j.Local, j.Delivered)
		}
	}
}
