package foreign_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// pods masquerades everything except 10.0.0.0/8.
func pods(shared bool) foreign.Share {
	all := []iprange.Range{iprange.All(false)}
	exempt := []iprange.Range{iprange.Of(netip.MustParsePrefix("10.0.0.0/8"))}
	return foreign.Share{
		Src: all, Dst: iprange.Subtract(all, exempt),
		Shared: shared, Priority: map[bool]int32{true: 100, false: 110}[shared],
	}
}

func TestRulesThatExemptedFromOlderAgentsAreFound(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	const (
		jump    = `-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT`
		masq    = `-A IP-MASQ-AGENT -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE`
		nothing = ""
		lost    = ", which no longer exempts it: add it to nonMasqueradeCIDRs"
		before  = " before the jump to this agent's chain, so these connections are not masqueraded"
	)
	for _, tt := range []struct {
		name, rules string
		want        string // in mode nftables
		shared      string // in mode iptables-nft
	}{
		{
			"accepts", "-A POSTROUTING -d 203.0.113.0/24 -j ACCEPT\n" + jump, "accepts 203.0.113.0/24" + lost,
			"accepts 203.0.113.0/24" + before,
		},
		{
			"returns", "-A POSTROUTING -d 203.0.113.0/24 -j RETURN\n" + jump, "returns 203.0.113.0/24" + lost,
			"returns 203.0.113.0/24" + before,
		},
		{
			"accepts after the takeover", "-A POSTROUTING -d 203.0.113.9 -j ACCEPT", "accepts 203.0.113.9" + lost,
			"accepts 203.0.113.9" + before,
		},
		{
			"accepts in a chain", "-N OTHER\n-A POSTROUTING -j OTHER\n-A OTHER -d 203.0.113.0/24 -j ACCEPT\n" + jump,
			"accepts 203.0.113.0/24" + lost, "accepts 203.0.113.0/24" + before,
		},
		{
			"returns from a chain", "-N OTHER\n-A POSTROUTING -j OTHER\n-A OTHER -d 203.0.113.0/24 -j RETURN\n" + jump, nothing,
			nothing,
		},
		{"after the jump", jump + "\n-A POSTROUTING -d 203.0.113.0/24 -j ACCEPT", nothing, nothing},
		{
			"of a source", "-A POSTROUTING -s 10.244.7.0/24 -j ACCEPT\n" + jump,
			"accepts any destination from 10.244.7.0/24, which no longer exempts these connections",
			"accepts any destination from 10.244.7.0/24" + before,
		},
		{
			"out of an interface", "-A POSTROUTING -o wg0 -j RETURN\n" + jump,
			`returns any destination where oifname "wg0", which no longer exempts these connections`,
			`returns any destination where oifname "wg0"` + before,
		},
		{"an exempt destination", "-A POSTROUTING -d 10.9.0.0/16 -j ACCEPT\n" + jump, nothing, nothing},
		{"all, if nothing follows", "-A POSTROUTING -j ACCEPT", nothing, nothing},
		{"what kube-proxy marked", "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j ACCEPT\n" + jump, nothing, nothing},
		{
			"to another address", "-A POSTROUTING -s 10.244.7.0/24 -d 198.51.100.0/24 -j SNAT --to-source 192.0.2.7",
			"rewrites the source of connections to 198.51.100.0/24 from 10.244.7.0/24, so this agent does not masquerade them",
			"rewrites the source of connections to 198.51.100.0/24 from 10.244.7.0/24, so this agent does not masquerade them",
		},
		{"to the same address", "-A POSTROUTING -s 10.244.7.0/24 -d 198.51.100.0/24 -j MASQUERADE", nothing, nothing},
		{"to another address while the older agent decides before it", jump +
			"\n-A POSTROUTING -d 198.51.100.0/24 -j SNAT --to-source 192.0.2.7", nothing, nothing},
		{
			"to another address once it does not", "-A POSTROUTING -d 198.51.100.0/24 -j SNAT --to-source 192.0.2.7",
			"rewrites the source of connections to 198.51.100.0/24, so this agent does not masquerade them",
			"rewrites the source of connections to 198.51.100.0/24, so this agent does not masquerade them",
		},
	} {
		for _, shared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s %t", tt.name, shared), func(t *testing.T) {
				ns, c := dialNS(t)
				nfttest.Run(t, ns, "*nat\n:IP-MASQ-AGENT - [0:0]\n"+masq+"\n"+tt.rules+"\nCOMMIT\n", "iptables-nft-restore",
					"--noflush")
				own := func(c nfnetlink.Chain) bool { return shared && c.Name == "IP-MASQ-AGENT" }
				s, err := foreign.Read(t.Context(), c, own)
				if err != nil {
					t.Fatal(err)
				}
				want := tt.want
				if shared {
					want = tt.shared
				}
				var got []string
				overruled, _ := foreign.Conflicts(s, pods(shared))
				for _, c := range overruled {
					got = append(got, c.Why())
				}
				if diff := cmp.Diff(want, strings.Join(got, "; ")); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestNumberOfRulesReadIsBounded(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	var rules strings.Builder
	rules.WriteString("table ip t {\nchain many {\n")
	for range 60_001 {
		rules.WriteString("counter\n")
	}
	rules.WriteString("}\nchain post { type nat hook postrouting priority 100; jump many\nmasquerade\n}\n}\n")
	nfttest.NFT(t, ns, rules.String(), "-f", "-")
	s := read(t, c)
	if s.Unread < 60_001 || len(s.Chains) != 2 {
		t.Errorf("%d rules of %d chains were not read", s.Unread, len(s.Chains))
	}
	if found := conflictsOf(s, prefixes(t, "10.0.0.0/8")); len(found) != 1 {
		t.Errorf("found %v", found)
	}
}
