package judge_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/nft/judge"
)

// In a universe of few addresses, at both ends of both families, sets are compared with
// lists of their members.
func TestSetsMatchTheirMembers(t *testing.T) {
	var universe []netip.Addr
	for _, ipv6 := range []bool{false, true} {
		all := judge.AllAddresses(ipv6)[0]
		for first, last, n := all.First, all.Last, 0; n < 5; first, last, n = first.Next(), last.Prev(), n+1 {
			universe = append(universe, first, last)
		}
	}
	slices.SortFunc(universe, netip.Addr.Compare)
	r := rand.New(rand.NewPCG(1, 2))
	random := func() (set judge.Addresses, members []bool) {
		members = make([]bool, len(universe))
		for range r.IntN(5) {
			from := r.IntN(len(universe))
			to := from + r.IntN(5)
			if to >= len(universe) || universe[from].Is4() != universe[to].Is4() {
				continue
			}
			set = set.Union(judge.Addresses{{First: universe[from], Last: universe[to]}})
			for i := from; i <= to; i++ {
				members[i] = true
			}
		}
		return set, members
	}
	check := func(set judge.Addresses, has func(i int) bool) {
		t.Helper()
		for i, a := range universe {
			if set.Contain(a) != has(i) {
				t.Fatalf("%v contains %s: %t", set, a, !has(i))
			}
		}
		for i := range len(set) - 1 {
			if !set[i].Last.Less(set[i+1].First) || set[i].Last.Next() == set[i+1].First {
				t.Fatalf("%v is not sorted, overlaps or touches", set)
			}
		}
	}
	for range 3_000 {
		a, inA := random()
		b, inB := random()
		check(a, func(i int) bool { return inA[i] })
		check(a.Intersect(b), func(i int) bool { return inA[i] && inB[i] })
		check(a.Subtract(b), func(i int) bool { return inA[i] && !inB[i] })
		var parts []netip.Prefix // which overlap and touch
		for _, r := range slices.Concat(a, b) {
			parts = append(parts, r.Prefixes()...)
		}
		check(judge.NewAddresses(parts), func(i int) bool { return inA[i] || inB[i] })
	}
	if all := fmt.Sprint(judge.AllAddresses(false), judge.AllAddresses(true)); all != "[0.0.0.0/0] [::/0]" {
		t.Errorf("all addresses are %s", all)
	}
	if judge.AllAddresses(false).Contain(netip.Addr{}) {
		t.Error("an unknown address is in a set")
	}
}
