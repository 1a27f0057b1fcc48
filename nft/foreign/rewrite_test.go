package foreign_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// Each rule is loaded for both families. A connection goes from a pod to a destination
// that the rule names, and another, the control, to one that it does not.
func TestConnectionsThatOtherRulesMayHaveDecidedAreRewrites(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
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
		{
			name: "marked by kube-proxy", at: above, rule: "ip daddr @dst meta mark & 0x4000 == 0x4000 masquerade",
			marked: true,
		},
		{
			name: "marked by portmap", at: "@other", rule: "ip daddr @dst meta mark & 0x2000 == 0x2000 masquerade",
			marked: true,
		},
		{name: "not without the bit", at: above, rule: "ip daddr @dst meta mark & 0x4000 != 0 masquerade", marked: true},
		{name: "marked by wg-quick", at: above, rule: "ip daddr @dst meta mark 51820 masquerade"},
		{name: "not marked by wg-quick", at: above, rule: "ip daddr @dst meta mark != 51820 masquerade"},
		{name: "a whole mark of one bit", at: above, rule: "ip daddr @dst meta mark 0x2000 masquerade"},
		{name: "a whole mark of the other bit", at: "@other", rule: "ip daddr @dst meta mark 0x4000 masquerade"},
		{name: "a mark of 16 bits", at: above, rule: "ip daddr @dst meta mark & 0xffff == 0x4000 masquerade"},
		{name: "all of 16 bits", at: above, rule: "ip daddr @dst meta mark & 0xffff == 0xffff masquerade"},
		{name: "both bits", at: above, rule: "ip daddr @dst meta mark & 0x6000 == 0x6000 masquerade"},
		{name: "either bit", at: above, rule: "ip daddr @dst meta mark & 0x6000 != 0 masquerade"},
		{name: "one of both bits", at: above, rule: "ip daddr @dst meta mark & 0x6000 == 0x2000 masquerade"},
		{name: "a set of marks", at: above, rule: "ip daddr @dst meta mark { 0x2000, 0x4000 } masquerade"},
		{name: "another bit", at: above, rule: "ip daddr @dst meta mark & 0x8000 == 0x8000 masquerade"},
		{name: "accept", at: above, rule: "ip daddr @dst accept", shared: true},
		{name: "accept under a condition", at: above, rule: "ip daddr @dst meta l4proto tcp accept", shared: true},
		{name: "accept in a chain", at: above, rule: "ip daddr @dst jump accepting", shared: true},
		{name: "accept by a map", at: above, rule: "ip daddr vmap { @dst : accept }", shared: true},
		{name: "return", at: above, rule: "ip daddr @dst return", shared: true},
		{name: "goto", at: above, rule: "ip daddr @dst goto returning", shared: true},
		{name: "goto by a map", at: above, rule: "ip daddr vmap { @dst : goto returning }", shared: true},
		{name: "goto from a chain", at: above, rule: "ip daddr @dst jump going", not: true},
		{name: "return from a chain", at: above, rule: "ip daddr @dst jump returning", not: true},
		{name: "drop", at: above, rule: "ip daddr @dst drop", not: true},
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
				ns, c := dialNS(t)
				rules := strings.NewReplacer("@dst", dst, "@new", addr).Replace(tt.rule)
				text := strings.ReplaceAll(`table ip nat {
					chain ours { counter; }
					chain accepting { accept; }
					chain returning { return; }
					chain going { goto returning; }
					chain POSTROUTING { type nat hook postrouting priority 100
						@above
						jump ours
						@below
					}
					chain other { type nat hook postrouting priority 90
						@other
					}
				}`, tt.at, rules)
				for _, at := range []string{above, below, "@other"} {
					text = strings.ReplaceAll(text, at, "")
				}
				if ipv6 {
					text = strings.NewReplacer("ip daddr", "ip6 daddr", "ip saddr", "ip6 saddr", "table ip ",
						"table ip6 ").Replace(text)
				}
				nfttest.NFT(t, ns, text, "-f", "-")
				own := func(c nfnetlink.Chain) bool { return shared && c.Name == "ours" }
				s, err := foreign.Read(t.Context(), c, own)
				if err != nil {
					t.Fatal(err)
				}
				r := foreign.FindRewrites(s)
				for _, translated := range []bool{false, true} {
					want := !tt.not && (shared || !tt.shared) && (translated || !tt.marked)
					from := netip.MustParseAddr(src)
					if got := r.Meet(from, netip.MustParseAddr(dst), translated); got != want {
						t.Errorf("%s, translated %t: %t, want %t", name, translated, got, want)
					}
					if r.Meet(from, netip.MustParseAddr(control), translated) || r.Everything() {
						t.Errorf("%s, translated %t: the control is met", name, translated)
					}
				}
			}
		}
	}
}
