package foreign_test

import (
	"net/netip"
	"testing"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
)

// What two paths lead to is told of both: their destinations, sources and common conditions.
// Pods have 10.244.0.0/16 and send on cali*.
func TestEachPathToARuleCounts(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	const (
		rewrites = "rewrites the source of connections to "
		docker   = "ip saddr 172.17.0.0/16 "
		pods     = "ip saddr 10.244.0.0/16 "
		instead  = ", so this agent does not masquerade them"
	)
	for _, tt := range []struct {
		rules, want string
		meets       bool
	}{
		{docker + "jump masking", rewrites + "10.0.0.0/8, 192.168.0.0/16 from 172.17.0.0/16", false},
		{pods + "jump masking", rewrites + "10.0.0.0/8, 192.168.0.0/16 from 10.244.0.0/16", true},
		{
			docker + "jump masking\n" + pods + "jump masking",
			rewrites + "10.0.0.0/8, 192.168.0.0/16 from 172.17.0.0/16 or 10.244.0.0/16", true,
		},
		{docker + "jump masking\njump masking", rewrites + "10.0.0.0/8, 192.168.0.0/16", true},
		{"meta l4proto tcp jump masking\n" + docker + "jump masking", rewrites + "10.0.0.0/8, 192.168.0.0/16", true},
		{
			"ip daddr 10.0.0.0/8 " + docker + "jump masking\nip daddr 192.168.0.0/16 " + docker + "jump masking",
			rewrites + "10.0.0.0/8, 192.168.0.0/16 from 172.17.0.0/16", false,
		},
		{
			"ip daddr 10.0.0.0/8 meta l4proto tcp jump masking\nip daddr 10.0.0.0/8 jump masking",
			rewrites + "10.0.0.0/8", true,
		},
		{`iifname "docker0" jump masking`, rewrites + `10.0.0.0/8, 192.168.0.0/16 where iifname "docker0"`, false},
		{`iifname "cali7" jump masking`, rewrites + `10.0.0.0/8, 192.168.0.0/16 where iifname "cali7"`, true},
		{
			`iifname "docker0" jump masking` + "\n" + `iifname "cali7" jump masking`,
			rewrites + "10.0.0.0/8, 192.168.0.0/16", true,
		},
		{"fib saddr type local jump masking", rewrites + "10.0.0.0/8, 192.168.0.0/16 from this node", false},
		{"fib saddr type != local jump masking", rewrites + "10.0.0.0/8, 192.168.0.0/16 from not this node", true},
		{"ip daddr 203.0.113.0/24 jump translating", rewrites + "203.0.113.0/24" + instead, true},
		{
			"ip daddr 203.0.113.0/24 meta l4proto tcp jump translating\nip daddr 198.51.100.0/24 jump translating",
			rewrites + "203.0.113.0/24, 198.51.100.0/24" + instead, true,
		},
		{
			"ip daddr 203.0.113.0/24 meta l4proto tcp jump translating\nip daddr != 10.0.0.0/8 jump translating",
			rewrites + "any destination" + instead, true,
		},
		{
			"ip daddr != 10.0.0.0/8 meta l4proto tcp jump translating\nip daddr 203.0.113.0/24 jump translating",
			rewrites + "any destination" + instead, true,
		},
	} {
		ns, c := dialNS(t)
		nfttest.NFT(t, ns, `table ip t {
			chain masking { masquerade; }
			chain translating { ip daddr != { 10.0.0.0/8, 192.168.0.0/16 } snat to 192.0.2.7; }
			chain post { type nat hook postrouting priority 0;
				`+tt.rules+`
			}
		}`, "-f", "-")
		exempt := prefixes(t, "10.0.0.0/8 192.168.0.0/16")
		all := []iprange.Range{iprange.All(false)}
		found, rest := foreign.Conflicts(read(t, c), foreign.Share{
			Exempt: exempt, Src: all, Dst: iprange.Subtract(all, iprange.SetOf(exempt)),
			Origin: judge.Names{{Name: "cali*", In: true}}, Pods: true, Priority: 110,
		})
		if len(found) != 1 || rest > 0 || found[0].Why() != tt.want {
			t.Errorf("%s\n got %v, %d not examined\nwant %s", tt.rules, found, rest, tt.want)
			continue
		}
		if got := found[0].From(iprange.SetOf([]netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")})); got != tt.meets {
			t.Errorf("%s: meets a pod: %t, want %t", tt.rules, got, tt.meets)
		}
	}
}
