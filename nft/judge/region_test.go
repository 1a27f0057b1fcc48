package judge_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
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
	for _, list := range []*[]config.CIDR{
		&c.NonMasqueradeCIDRs, &c.ForceMasqueradeCIDRs, &c.NonMasqueradeSrcCIDRs, &c.MasqueradeSrcCIDRs,
	} {
		if m.IntN(12) == 0 {
			*list = append(slices.Clone(*list), cases.CIDRs("0.0.0.0/0", "::/0")...)
		}
	}
	if m.IntN(12) == 0 {
		c.NonMasqueradeOutInterfaces = c.MasqueradeOutInterfaces
	}
	return c
}

// similar returns a config that differs from c in a key or two.
func similar(m cases.Maker, c config.Config) config.Config {
	other := m.Config()
	for _, take := range []func(){
		func() { c.NonMasqueradeCIDRs = other.NonMasqueradeCIDRs },
		func() { c.ForceMasqueradeCIDRs = other.ForceMasqueradeCIDRs },
		func() { c.NonMasqueradeSrcCIDRs = other.NonMasqueradeSrcCIDRs },
		func() { c.MasqueradeSrcCIDRs = other.MasqueradeSrcCIDRs },
		func() { c.MasqLinkLocal, c.MasqLinkLocalIPv6 = other.MasqLinkLocal, other.MasqLinkLocalIPv6 },
		func() { c.EnableIPv6 = other.EnableIPv6 },
		func() { c.ExemptHost = other.ExemptHost },
		func() { c.MasqueradeSrcInterfaces = other.MasqueradeSrcInterfaces },
		func() { c.NonMasqueradeOutInterfaces = other.NonMasqueradeOutInterfaces },
		func() { c.MasqueradeOutInterfaces = other.MasqueradeOutInterfaces },
	} {
		if m.IntN(4) == 0 {
			take()
		}
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
func included(regions []judge.Region, c nft.Connection) (n int) {
	for _, r := range regions {
		if r.Includes(c) {
			n++
		}
	}
	return n
}

// What comes after a condition that masquerades must not ask for anything but
// destinations: then the sets of a region do not depend on each other.
func TestOnlyDestinationsAreAskedForAfterAConditionThatMasquerades(t *testing.T) {
	masquerades := false
	for _, row := range config.Conditions() {
		if masquerades = masquerades || row.Masquerade; masquerades && row.Asks != config.DestinationAddress {
			t.Errorf("%s asks for %s", row.Key, row.Asks)
		}
	}
	if !masquerades {
		t.Error("no condition masquerades")
	}
}

// A connection is in one part of a difference if it is in the first region and not in the
// second, and in none otherwise. The same is true of a part of a difference.
func TestDifferencesOfRegionsAreExactAndDoNotOverlap(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(22)
	parts, gone := map[int]int{}, 0
	for n := range nfttest.Rounds(500, 1_500, 10_000) {
		before, after := extremes(m, m.Config()), extremes(m, m.Config())
		if n%4 < 2 {
			after = similar(m, before)
		}
		ipv6, third := n%2 == 0, similar(m, after)
		of := func(c config.Config) judge.Region { return judge.RegionOf(policyOf(c), ipv6) }
		a, b, c := of(before), of(after), of(third)
		left := a.Minus(b)
		parts[len(left)]++
		var rests [][]judge.Region
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
	for n := range nfttest.Rounds(200, 400, 2_000) {
		c, o, ipv6 := extremes(m, m.Config()), similar(m, m.Config()), n%2 == 0
		r := judge.RegionOf(policyOf(c), ipv6)
		for _, part := range append(r.Minus(judge.RegionOf(policyOf(o), ipv6)), r) {
			wide, limited := part.OnAnyInterface()
			for _, conn := range someConnections(m, ipv6, c, o) {
				some, all := false, true
				for _, in := range names {
					for _, out := range names {
						conn.In, conn.Out = in, out
						some, all = some || part.Includes(conn), all && part.Includes(conn)
					}
				}
				if wide.Includes(conn) != some || !limited && some != all {
					t.Fatalf("%+v: %t on any interface, %t on all, but %t, limited %t\n%+v",
						conn, some, all, wide.Includes(conn), limited, part)
				}
				seen[fmt.Sprint(some, all, limited)]++
			}
		}
	}
	if len(seen) < 4 {
		t.Errorf("seen %v", seen)
	}
}

func TestDifferencesOfPoliciesHaveTheFewestParts(t *testing.T) {
	const others = "[0.0.0.0-9.255.255.255 11.0.0.0-169.253.255.255 " +
		"169.255.0.0-192.167.255.255 192.169.0.0-255.255.255.255]"
	base := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "192.168.0.0/16")}
	names := func(list ...string) (out []config.Interface) {
		for _, name := range list {
			out = append(out, config.Interface{Name: name})
		}
		return out
	}
	for _, tt := range []struct {
		name   string
		change func(*config.Config)
		less   string // what is not masqueraded any more
		more   string // and what is now
	}{
		{"the same in halves", func(c *config.Config) {
			c.NonMasqueradeCIDRs = cases.CIDRs("192.168.0.0/16", "10.128.0.0/9", "10.0.0.0/9")
		}, "", ""},
		{
			"both ways", func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8", "172.16.0.0/12") },
			"[* yes]: [0.0.0.0/0] to [172.16.0.0/12] by [* yes]", "[* yes]: [0.0.0.0/0] to [192.168.0.0/16] by [* yes]",
		},
		{
			"the node", func(c *config.Config) { c.ExemptHost = &config.Position{} },
			"[ yes]: [0.0.0.0/0] to " + others + " by [* yes]", "",
		},
		{
			"interfaces", func(c *config.Config) {
				c.MasqueradeSrcInterfaces, c.MasqueradeOutInterfaces = names("cni0"), names("eth*")
				c.NonMasqueradeOutInterfaces = names("eth1")
			},
			"[* yes  no cni0 no]: [0.0.0.0/0] to " + others + " by [* yes]; " +
				"[ yes]: [0.0.0.0/0] to " + others + " by [* yes]; " +
				"[cni0 yes]: [0.0.0.0/0] to " + others + " by [* yes eth* no eth1 yes]", "",
		},
	} {
		after := base
		after.NonMasqueradeCIDRs = slices.Clone(base.NonMasqueradeCIDRs)
		tt.change(&after)
		b, a := judge.RegionOf(policyOf(base), false), judge.RegionOf(policyOf(after), false)
		if less, more := describe(b.Minus(a)), describe(a.Minus(b)); less != tt.less || more != tt.more {
			t.Errorf("%s: %q and %q, want %q and %q", tt.name, less, more, tt.less, tt.more)
		}
	}
	one, other := base, base
	one.MasqueradeSrcCIDRs = cases.CIDRs("10.5.0.0/16")
	other.MasqueradeSrcCIDRs, other.NonMasqueradeCIDRs = cases.CIDRs("10.6.0.0/16"), cases.CIDRs("172.16.0.0/12")
	got := describe(judge.RegionOf(policyOf(one), false).Minus(judge.RegionOf(policyOf(other), false)))
	if want := "[* yes]: [10.5.0.0/16] to " + others + " by [* yes]"; got != want {
		t.Errorf("disjoint sources, and another destination: %q, want %q", got, want)
	}
}

func describe(regions []judge.Region) string {
	names := func(n judge.Names) (words []string) {
		for _, p := range n {
			words = append(words, p.Name+map[bool]string{true: " yes", false: " no"}[p.In])
		}
		return words
	}
	var words []string
	for _, r := range regions {
		words = append(words, fmt.Sprintf("%s: %s to %s by %s", names(r.Origin), r.Src, r.Dst, names(r.Out)))
	}
	return strings.Join(words, "; ")
}
