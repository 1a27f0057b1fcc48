package nft_test

import (
	"fmt"
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func policyOf(c config.Config) nft.Policy {
	return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
}

// extremes adds lists that a random config rarely has: of everything, and of nothing
// that is left.
func extremes(m cases.Maker, c config.Config) config.Config {
	for _, list := range []*[]config.CIDR{&c.NonMasqueradeCIDRs, &c.ForceMasqueradeCIDRs, &c.NonMasqueradeSrcCIDRs, &c.MasqueradeSrcCIDRs} {
		if m.IntN(12) == 0 {
			*list = append(slices.Clone(*list), cases.CIDRs("0.0.0.0/0", "::/0")...)
		}
	}
	if m.IntN(12) == 0 {
		c.NonMasqueradeOutInterfaces = c.MasqueradeOutInterfaces
	}
	return c
}

// someConnections returns connections of a family at the edges of the lists of two configs.
func someConnections(m cases.Maker, ipv6 bool, before, after config.Config) []nft.Connection {
	all := make([]nft.Connection, 20)
	for i := range all {
		c := m.Connection(m.Near(before, ipv6), m.Near(after, ipv6))
		if m.IntN(2) == 0 {
			c.Src, c.Dst = c.Dst, c.Src
		}
		switch m.IntN(8) {
		case 0:
			c.ToNode = true
		case 1:
			c.In, c.Out = "", ""
		}
		all[i] = c
	}
	return all
}

// included returns how many of the regions include a connection.
func included(regions []nft.Region, c nft.Connection) (n int) {
	for _, r := range regions {
		if r.Includes(c) {
			n++
		}
	}
	return n
}

func TestRegionsHaveTheConnectionsThatPoliciesMasquerade(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(21)
	count := map[nft.Verdict]int{}
	for n := range nfttest.Rounds(500, 10_000, 10_000) {
		c, ipv6 := extremes(m, m.Config()), n%2 == 0
		p := policyOf(c)
		r := p.Region(ipv6)
		decider := nft.NewDecider(p)
		for _, conn := range someConnections(m, ipv6, c, c) {
			want := p.Decide(conn)
			if specified := cases.Specified(c, conn); want != specified || decider.Decide(conn) != want {
				t.Fatalf("%+v: %s, want %s\n%+v", conn, want, specified, c)
			}
			if r.Includes(conn) != (want == nft.Masqueraded) {
				t.Fatalf("%+v is %s: in %+v is %t\n%+v", conn, want, r, r.Includes(conn), c)
			}
			count[want]++
		}
	}
	if count[nft.Masqueraded] < 500 || count[nft.Exempt] < 500 || count[nft.Local] < 500 {
		t.Errorf("verdicts: %v", count)
	}
}

// A connection is in one part of a difference if it is in the first region and not in the
// second, and in none otherwise. The same is true of a part of a difference.
func TestDifferencesOfRegionsAreExactAndDoNotOverlap(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(22)
	parts, gone := map[int]int{}, 0
	for n := range nfttest.Rounds(500, 10_000, 10_000) {
		before, after := extremes(m, m.Config()), extremes(m, m.Config())
		if n%4 < 2 {
			after = similar(m, before)
		}
		ipv6, third := n%2 == 0, similar(m, after)
		a, b, c := policyOf(before).Region(ipv6), policyOf(after).Region(ipv6), policyOf(third).Region(ipv6)
		left := a.Minus(b)
		parts[len(left)]++
		flips := nft.Flips(policyOf(before), policyOf(after))
		var rests [][]nft.Region
		for _, part := range left {
			if part.Empty() {
				t.Fatalf("%+v without %+v has an empty part: %+v", a, b, left)
			}
			if node := part.Origin.Has(""); node && len(part.Origin) != 1 {
				t.Fatalf("%+v has some of what was received and what the node sends", part)
			}
			rests = append(rests, part.Minus(c))
		}
		for _, conn := range someConnections(m, ipv6, before, after) {
			if got, want := included(left, conn), a.Includes(conn) && !b.Includes(conn); got > 1 || got == 1 != want {
				t.Fatalf("%+v is in %d of %+v, want %t\n%+v\n%+v", conn, got, left, want, a, b)
			}
			flipped := slices.ContainsFunc(flips, func(f nft.Flip) bool {
				return f.Before == nft.Masqueraded && f.Includes(conn)
			})
			if flipped != (included(left, conn) == 1) {
				t.Fatalf("%+v: flips %t\n%+v\n%+v", conn, flipped, flips, left)
			}
			for i, part := range left {
				if got, want := included(rests[i], conn), part.Includes(conn) && !c.Includes(conn); got > 1 || got == 1 != want {
					t.Fatalf("%+v is in %d of %+v, want %t\n%+v\n%+v", conn, got, rests[i], want, part, c)
				}
			}
			gone += included(left, conn)
		}
	}
	if gone < 500 || parts[0] < 20 || parts[1] < 20 || parts[3] < 20 || parts[6] > 0 {
		t.Errorf("%d connections in differences, by parts %v", gone, parts)
	}
}

func TestRegionOnAnyInterfaceDropsOnlyNames(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(23)
	names := append(cases.Interfaces(), "wg9", "w9", "eth09", "eth9", "pod9", "")
	seen := map[string]int{}
	for n := range nfttest.Rounds(200, 2_000, 2_000) {
		c, ipv6 := extremes(m, m.Config()), n%2 == 0
		r := policyOf(c).Region(ipv6)
		wide, limited := r.OnAnyInterface()
		for _, conn := range someConnections(m, ipv6, c, c) {
			some, all := false, true
			for _, in := range names {
				for _, out := range names {
					conn.In, conn.Out = in, out
					some, all = some || r.Includes(conn), all && r.Includes(conn)
				}
			}
			if wide.Includes(conn) != some || !limited && some != all {
				t.Fatalf("%+v: %t on any interface, %t on all, but %t, limited %t\n%+v", conn, some, all, wide.Includes(conn), limited, r)
			}
			seen[fmt.Sprint(some, all, limited)]++
		}
	}
	if len(seen) != 4 {
		t.Errorf("seen %v", seen)
	}
}
