package nft_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func anyHolds(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// edges returns the first and the last address of each prefix of the configs, and
// their neighbours.
func edges(ipv6, source bool, configs ...config.Config) []netip.Addr {
	all := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	if !source {
		all = append(all, netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10"))
	}
	for _, c := range configs {
		lists := [][]config.CIDR{c.NonMasqueradeCIDRs, c.ForceMasqueradeCIDRs}
		if source {
			lists = [][]config.CIDR{c.NonMasqueradeSrcCIDRs, c.MasqueradeSrcCIDRs}
		}
		for _, entry := range slices.Concat(lists...) {
			all = append(all, entry.Prefix)
		}
	}
	var out []netip.Addr
	for _, p := range all {
		r := iprange.Of(p)
		for _, a := range []netip.Addr{r.From, r.To, r.From.Prev(), r.To.Next()} {
			if a.IsValid() && a.Is6() == ipv6 {
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// includes reports whether a flip's interfaces include a name. A prefix may be
// listed together with a longer one that is excluded.
func includes(i nft.Interfaces, name string) bool {
	if len(i.Names) == 0 || i.But {
		return !slices.Contains(i.Names, name) || len(i.Names) == 0
	}
	return slices.ContainsFunc(i.Names, func(n string) bool { return config.Interface{Name: n}.Matches(name) })
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

func TestFlipsMatchTheVerdictsBeforeAndAfter(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(21)
	flipped, kept := 0, 0
	configs := nfttest.Rounds(200, 1000, 1000)
	for n := range configs {
		before := m.Config()
		after := m.Config()
		if n%2 == 0 {
			after = similar(m, before)
		}
		flips := nft.Flips(nft.NewPolicy(before, nft.Options{Layout: native.Layout{}}), nft.NewPolicy(after, nft.Options{Layout: native.Layout{}}))
		for _, ipv6 := range []bool{false, true} {
			// Each destination is combined with a few sources.
			sources := edges(ipv6, true, before, after)
			m.Shuffle(len(sources), func(i, j int) { sources[i], sources[j] = sources[j], sources[i] })
			for _, src := range sources[:min(2, len(sources))] {
				for _, dst := range edges(ipv6, false, before, after) {
					conn := m.Connection(src, dst)
					was, is := cases.Specified(before, conn), cases.Specified(after, conn)
					var reported []string
					for _, f := range flips {
						in := anyHolds(f.Sources, src) && anyHolds(f.Destinations, dst)
						if f.IPv6 == ipv6 && in == (anyHolds(f.OtherSources, src) || anyHolds(f.OtherDestinations, dst)) || f.Includes(conn) && !in || f.Includes(conn) && !(includes(f.In, conn.In) && includes(f.Out, conn.Out)) {
							t.Fatalf("%s to %s: %t in %v to %v", src, dst, in, f.Sources, f.Destinations)
						}
						if f.Includes(conn) {
							reported = append(reported, fmt.Sprintf("%s>%s", f.Before, f.After))
						}
					}
					want := ""
					if kept++; was != is {
						want = fmt.Sprintf("%s>%s", was, is)
						flipped++
					}
					if got := strings.Join(reported, " "); got != want {
						t.Fatalf("%+v: %q, want %q\n%+v\n%+v\n%+v", conn, got, want, before, after, flips)
					}
				}
			}
		}
	}
	if flipped < 5*configs || kept < 2*flipped {
		t.Errorf("%d of %d flipped", flipped, kept)
	}
}

func TestFlipsUseTheFewestCIDRs(t *testing.T) {
	policy := func(c config.Config) nft.Policy { return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}) }
	base := config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "192.168.0.0/16")}
	for _, tt := range []struct {
		name   string
		change func(*config.Config)
		want   []string
	}{
		{"nothing", func(*config.Config) {}, nil},
		{"the same in halves", func(c *config.Config) {
			c.NonMasqueradeCIDRs = cases.CIDRs("192.168.0.0/16", "10.128.0.0/9", "10.0.0.0/9")
		}, nil},
		{"half of it", func(c *config.Config) { c.NonMasqueradeCIDRs[0] = cases.CIDRs("10.0.0.0/9")[0] }, []string{
			"[0.0.0.0/0] to [10.128.0.0/9]: exempt to masqueraded",
		}},
		{"by source", func(c *config.Config) { c.NonMasqueradeSrcCIDRs = cases.CIDRs("10.5.0.0/16") }, []string{
			"[10.5.0.0/16] to [0.0.0.0/5 8.0.0.0/7 11.0.0.0/8 12.0.0.0/6 16.0.0.0/4 32.0.0.0/3 64.0.0.0/2 128.0.0.0/3 " +
				"160.0.0.0/5 168.0.0.0/8 169.0.0.0/9 169.128.0.0/10 169.192.0.0/11 169.224.0.0/12 169.240.0.0/13 " +
				"169.248.0.0/14 169.252.0.0/15 169.255.0.0/16 170.0.0.0/7 172.0.0.0/6 176.0.0.0/4 192.0.0.0/9 " +
				"192.128.0.0/11 192.160.0.0/13 192.169.0.0/16 192.170.0.0/15 192.172.0.0/14 192.176.0.0/12 192.192.0.0/10 " +
				"193.0.0.0/8 194.0.0.0/7 196.0.0.0/6 200.0.0.0/5 208.0.0.0/4 224.0.0.0/3]: masqueraded to exempt",
		}},
		{"both ways", func(c *config.Config) {
			c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8", "172.16.0.0/12")
		}, []string{
			"[0.0.0.0/0] to [172.16.0.0/12]: masqueraded to exempt",
			"[0.0.0.0/0] to [192.168.0.0/16]: exempt to masqueraded",
		}},
		{"IPv6", func(c *config.Config) {
			c.EnableIPv6 = true
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("8000::/1")...)
		}, []string{
			"[::/0] to [::/1]: exempt to masqueraded",
		}},
	} {
		after := base
		after.NonMasqueradeCIDRs = slices.Clone(base.NonMasqueradeCIDRs)
		tt.change(&after)
		var got []string
		for _, f := range nft.Flips(policy(base), policy(after)) {
			got = append(got, fmt.Sprintf("%v to %v: %s to %s", f.Sources, f.Destinations, f.Before, f.After))
			if (len(f.OtherSources) == 0) != (len(f.Sources) == 1 && f.Sources[0].Bits() == 0) {
				t.Errorf("%s: %v and %v are all sources", tt.name, f.Sources, f.OtherSources)
			}
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestDeciderMatchesItsPolicy(t *testing.T) {
	m := cases.NewMaker(22)
	for range 300 {
		c := m.Config()
		d := nft.NewDecider(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}))
		for _, ipv6 := range []bool{false, true} {
			for _, src := range edges(ipv6, true, c) {
				for _, dst := range edges(ipv6, false, c) {
					conn := m.Connection(src, dst)
					conn.ToNode = m.IntN(8) == 0
					if got, want := d.Decide(conn), cases.Specified(c, conn); got != want {
						t.Fatalf("%+v: %s, want %s\n%+v", conn, got, want, c)
					}
				}
			}
		}
	}
}
