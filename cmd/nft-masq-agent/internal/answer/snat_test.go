package answer

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
)

// For random policies, explain has the verdict that is specified, with CIDRs that have the address, and
// names the address that is specified, and the entry that decides.
func TestExplanationHasTheSpecifiedVerdictAndAddress(t *testing.T) {
	m := cases.NewMaker(5)
	byRule := 0
	verdicts := map[nft.Verdict]int{}
	for range nfttest.Rounds(1_000, 1_000, 10_000) {
		c, node := m.Config(), m.Addresses()
		p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).WithAddresses(node)
		for range 10 {
			ipv6 := c.EnableIPv6 && m.IntN(2) == 0
			conn := m.Connection(m.Near(c, ipv6), m.Near(c, ipv6))
			a := expect(p, conn, routes.Route{})
			possible := cases.SpecifiedSources(c, conn, node)
			want := cases.Specified(c, conn)
			verdicts[want]++
			if a.Verdict != want {
				t.Fatalf("%+v: %s, want %s: config %+v", conn, a.Verdict, want, c)
			}
			for _, s := range a.Steps {
				asked := conn.Dst
				if strings.HasPrefix(s.Question, "source") {
					asked = conn.Src
				}
				cidr, err := netip.ParsePrefix(s.Match)
				if err == nil && !cidr.Contains(asked) {
					t.Fatalf("%s is not in %s", asked, cidr)
				}
			}
			if want != nft.Masqueraded {
				continue
			}
			first, _, _ := strings.Cut(a.words, ",")
			named, err := netip.ParseAddr(first)
			if (err == nil) != (len(possible) > 0) || err == nil && !slices.Contains(possible, named) {
				t.Fatalf("%+v: %q, want one of %v: config %+v on a node with %v", conn, a.words, possible, c, node)
			}
			if strings.Contains(a.words, "by entry ") {
				byRule++
			}
		}
	}
	if byRule < 100 || len(verdicts) != 3 {
		t.Errorf("%d were decided by an entry; %v", byRule, verdicts)
	}
}
