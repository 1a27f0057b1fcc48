package trace_test

import (
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/trace"
)

// Addresses between two ends are alike for rules, unless these compare a part that is no prefix, or
// elements that are not known.
func TestEndsAreWhereRulesTellAddressesApart(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	for _, tt := range []struct {
		rules, src, dst string // an end of each, "" if there is none
		exact           bool
	}{
		{"ip saddr 10.1.0.0/16 accept", "10.1.0.0", "", false},
		{"ip saddr 10.1.0.0/16 accept", "10.2.0.0", "", false},
		{"ip daddr 10.1.0.0/16 accept", "", "10.2.0.0", false},
		{"ip daddr 255.0.0.0/8 accept", "", "255.0.0.0", false},
		{"ip daddr { 10.1.0.0/16, 10.3.0.0/16 } accept", "", "10.4.0.0", false},
		{"ip saddr . ip daddr { 10.1.0.1 . 10.2.0.1 } accept", "10.1.0.2", "10.2.0.2", false},
		{"ip saddr . iifname . ip daddr { 10.1.0.1 . lo . 10.2.0.1 } accept", "10.1.0.2", "10.2.0.2", false},
		{"ip saddr & 0.0.0.255 == 0.0.0.1 accept; ip saddr 10.1.0.0/16 accept", "10.2.0.0", "", true},
		{"ip saddr & 0.0.0.255 { 0.0.0.1 } accept; ip saddr { 10.1.0.1 } accept", "10.1.0.2", "", true},
		{"ip daddr & 0.0.0.255 { 0.0.0.1 } accept; ip daddr { 10.1.0.1 } accept", "", "10.1.0.2", true},
		{"tcp flags . ip daddr { syn . 10.1.0.1 } accept; ip daddr 10.2.0.0/16 accept", "", "10.2.0.0", true},
		{"dnat to ip daddr map { 10.1.0.1 : 10.9.0.1 }", "", "10.1.0.2", false},
		{"ip daddr vmap { 10.1.0.1 : accept }", "", "10.1.0.2", false},
	} {
		nfttest.NFT(t, ns, "flush ruleset; table ip t { chain c { type nat hook prerouting priority -100; "+tt.rules+"; }; }",
			"-f", "-")
		e := trace.New(read(t, c)).Ends(9)
		has := func(all []netip.Addr, end string) bool {
			return end == "" && len(all) == 2 || end != "" && slices.Contains(all, netip.MustParseAddr(end))
		}
		if e.Exact != tt.exact || !has(e.Src, tt.src) || !has(e.Dst, tt.dst) {
			t.Errorf("%s: %+v", tt.rules, e)
		}
	}
}
