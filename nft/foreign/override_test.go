package foreign_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
)

// Besides NAT before this agent, these rules contradict a policy that masquerades everything but 10.0.0.0/8
// and fd00::/8, of packets that pods send on cali*. Rules for certain protocols, ports or
// marks do not.
func TestRulesThatOverrideThePolicyAreFound(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	const (
		raw      = "type filter hook prerouting priority raw;"
		mangle   = "type filter hook prerouting priority mangle;"
		forward  = "type filter hook forward priority filter;"
		output   = "type filter hook output priority raw;"
		leaving  = "type filter hook postrouting priority mangle;"
		untracks = "turns off connection tracking, and with it NAT, of connections to "
		writes   = "writes into the header of packets to "
		drops    = "drops everything"
		earlier  = "type nat hook postrouting priority 110;"
		later    = "type nat hook postrouting priority 111;"
		instead  = "rewrites the source of connections to any destination, so this agent does not masquerade them"
		nothing  = ""
	)
	for _, tt := range []struct{ name, base, rules, want string }{
		{"notrack", raw, "notrack", untracks + "any destination"},
		{"notrack to some", raw, "ip daddr 203.0.113.0/24 notrack", untracks + "203.0.113.0/24"},
		{"notrack to the exempt", raw, "ip daddr 10.1.0.0/16 notrack", nothing},
		{"notrack from some", raw, "ip saddr 10.244.0.0/16 notrack", untracks + "any destination from 10.244.0.0/16"},
		{"notrack on pods' interfaces", raw, `iifname "cali*" notrack`, untracks + "any destination"},
		{"notrack on one of them", raw, `iifname "cali7" notrack`, untracks + `any destination where iifname "cali7"`},
		{"notrack on another interface", raw, `iifname "docker0" notrack`, nothing},
		{"notrack of a protocol", raw, "meta l4proto tcp notrack", nothing},
		{"notrack of a port", raw, "udp dport 53 notrack", nothing},
		{"notrack of a mark", raw, "meta mark 7 notrack", nothing},
		{"notrack after all were accepted", raw, "accept\nnotrack", nothing},
		{"notrack in a chain", raw, "jump untracking", untracks + "any destination"},
		{"notrack after connection tracking", mangle, "notrack", nothing},
		{"notrack of the node's packets", output, "notrack", nothing},
		{"notrack in postrouting", leaving, "notrack", nothing},
		{"source", leaving, "ip saddr set 192.0.2.7", writes + "any destination"},
		{"source, of some", leaving, "ip daddr 203.0.113.0/24 ip saddr set 192.0.2.7", writes + "203.0.113.0/24"},
		{"source, of the exempt", leaving, "ip daddr 10.1.0.0/16 ip saddr set 192.0.2.7", nothing},
		{"source, before connection tracking", raw, "ip saddr set 192.0.2.7", writes + "any destination"},
		{"source, of a protocol", leaving, "meta l4proto tcp ip saddr set 192.0.2.7", nothing},
		{"destination", leaving, "ip daddr set 192.0.2.7", nothing},
		{"another field", leaving, "ip dscp set cs1", nothing},
		{"policy", forward + " policy drop;", "", drops},
		{"policy, postrouting", leaving + " policy drop;", "counter", drops},
		{"policy, before connection tracking", raw + " policy drop;", "counter", drops},
		{"policy, and a rule that drops", forward + " policy drop;", "drop", drops},
		{"policy, and a rule that returns", leaving + " policy drop;", "ip daddr 203.0.113.0/24 return", drops},
		{"policy, and a rule that accepts", forward + " policy drop;", "ct state established accept", nothing},
		{"policy, and a jump", forward + " policy drop;", "jump untracking", nothing},
		{"policy, and a map", forward + " policy drop;", "ip daddr vmap { 203.0.113.9 : accept }", nothing},
		{"accepting policy", forward, "drop", nothing},
		{"NAT before this agent", earlier, "snat to 192.0.2.7", instead},
		{"NAT after it", later, "snat to 192.0.2.7", nothing},
		{"masquerading before this agent", earlier, "masquerade", nothing},
	} {
		for _, ipv6 := range []bool{false, true} {
			ns, c := dialNS(t)
			text := "table ip t {\nchain untracking { notrack; }\nchain base { " + tt.base + "\n" + tt.rules + "\n}\n}\n"
			want := tt.want
			if ipv6 {
				v6 := strings.NewReplacer(
					"table ip ", "table ip6 ", "ip daddr", "ip6 daddr", "ip saddr", "ip6 saddr", "ip dscp", "ip6 dscp",
					"203.0.113.0/24", "2001:db8::/64", "203.0.113.9", "2001:db8::9", "10.1.0.0/16", "fd00:1::/32",
					"10.244.0.0/16", "2001:db8:244::/48", "192.0.2.7", "2001:db8:9::7")
				text, want = v6.Replace(text), v6.Replace(want)
			}
			nfttest.NFT(t, ns, text, "-f", "-")
			all := []iprange.Range{iprange.All(false), iprange.All(true)}
			exempt := iprange.SetOf([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")})
			found, rest := foreign.Conflicts(read(t, c), foreign.Share{
				Src: all, Dst: iprange.Subtract(all, exempt), Origin: judge.Names{{Name: "cali*", In: true}}, Priority: 110,
			})
			var got []string
			for _, c := range found {
				got = append(got, c.Why())
			}
			if got := strings.Join(got, "; "); got != want || rest > 0 {
				t.Errorf("%s: %q, want %q", fmt.Sprintf("%s, IPv6 %t", tt.name, ipv6), got, want)
			}
		}
	}
}
