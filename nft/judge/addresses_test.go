package judge_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// In a universe of few addresses, at both ends of both families, sets are compared with their members.
func TestSetsMatchTheirMembers(t *testing.T) {
	var universe []netip.Addr
	for _, ipv6 := range []bool{false, true} {
		first := judge.Everything(ipv6).Addr()
		last := netip.MustParseAddr("255.255.255.255")
		if ipv6 {
			last = netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
		}
		for range 6 {
			universe = append(universe, first, last)
			first = first.Next()
			last = last.Prev()
		}
	}
	slices.SortFunc(universe, netip.Addr.Compare)
	r := rand.New(rand.NewPCG(1, 2))
	network := func() netip.Prefix {
		a := universe[r.IntN(len(universe))]
		return netip.PrefixFrom(a, a.BitLen()-r.IntN(4)).Masked()
	}
	for range 3_000 {
		var list []netip.Prefix
		var cidrs []config.CIDR
		for range r.IntN(6) {
			p := network()
			list = append(list, p)
			cidrs = append(cidrs, config.CIDR{Prefix: p})
		}
		contains := func(a netip.Addr) bool {
			return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
		}
		set := judge.NewAddresses(list)
		for _, a := range universe {
			if set.Contain(a) != contains(a) {
				t.Fatalf("%v contains %s: %t", list, a, !contains(a))
			}
		}
		for i := range len(set) - 1 {
			if !set[i].Last.Less(set[i+1].First) || set[i].Last.Next() == set[i+1].First {
				t.Fatalf("%v is not sorted, overlaps or touches", set)
			}
		}
		whole := network()
		want := netip.Addr{}
		for a := whole.Addr(); whole.Contains(a) && !want.IsValid(); a = a.Next() {
			if !contains(a) {
				want = a
			}
		}
		if got, found := judge.Uncovered(whole, nft.NewList(cidrs)); got != want || found != want.IsValid() {
			t.Fatalf("%s without %v: %s %t, want %s", whole, list, got, found, want)
		}
	}
	if judge.NewAddresses([]netip.Prefix{judge.Everything(false)}).Contain(netip.Addr{}) {
		t.Error("an unknown address is in a set")
	}
}
