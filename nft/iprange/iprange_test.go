package iprange_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/iprange"
)

func TestPrefixesConvertToRangesAndBack(t *testing.T) {
	for _, tt := range []struct{ prefix, from, to, text string }{
		{"0.0.0.0/0", "0.0.0.0", "255.255.255.255", "0.0.0.0/0"},
		{"10.0.0.0/8", "10.0.0.0", "10.255.255.255", "10.0.0.0/8"},
		{"10.1.2.3/8", "10.0.0.0", "10.255.255.255", "10.0.0.0/8"},
		{"240.0.0.0/4", "240.0.0.0", "255.255.255.255", "240.0.0.0/4"},
		{"198.51.100.2/31", "198.51.100.2", "198.51.100.3", "198.51.100.2/31"},
		{"255.255.255.255/32", "255.255.255.255", "255.255.255.255", "255.255.255.255"},
		{"::/0", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "::/0"},
		{"fe80::/10", "fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fe80::/10"},
		{"::1/128", "::1", "::1", "::1"},
	} {
		p := netip.MustParsePrefix(tt.prefix)
		r := iprange.FromPrefix(p)
		if want := (iprange.Range{First: netip.MustParseAddr(tt.from), Last: netip.MustParseAddr(tt.to)}); r != want {
			t.Errorf("%s: range %v, want %v", p, r, want)
		}
		if got, ok := r.Prefix(); !ok || got != p.Masked() {
			t.Errorf("%s: prefix of the range is %s, %t", p, got, ok)
		}
		if got := r.Prefixes(); len(got) != 1 || got[0] != p.Masked() {
			t.Errorf("%s: prefixes of the range are %s", p, got)
		}
		if r.String() != tt.text {
			t.Errorf("%s prints %s, want %s", p, r, tt.text)
		}
	}
	for text, prefixes := range map[string]string{ // of the fewest, the first ones
		"10.0.0.0-10.0.2.255":                            "[10.0.0.0/23 10.0.2.0/24]",
		"10.0.0.1-10.0.0.6":                              "[10.0.0.1/32 10.0.0.2/31 10.0.0.4/31 10.0.0.6/32]",
		"0.0.0.0-255.255.255.254":                        "[0.0.0.0/1 128.0.0.0/2 ",
		"0.0.0.1-255.255.255.255":                        "[0.0.0.1/32 0.0.0.2/31 ",
		"fd00::-fd00::2":                                 "[fd00::/127 fd00::2/128]",
		"10.0.0.255-10.0.1.0":                            "[10.0.0.255/32 10.0.1.0/32]",
		"10.0.0.2-10.0.0.1":                              "[]",
		"8000::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe": "[8000::/2 c000::/3 ",
	} {
		from, to, _ := strings.Cut(text, "-")
		r := iprange.Range{First: netip.MustParseAddr(from), Last: netip.MustParseAddr(to)}
		if p, ok := r.Prefix(); ok || r.String() != text || !strings.HasPrefix(fmt.Sprint(r.Prefixes()), prefixes) {
			t.Errorf("%s is prefix %s, %t, and has %s, want %s", r, p, ok, r.Prefixes(), prefixes)
		}
	}
	if p, ok := (iprange.Range{}).Prefix(); ok || (iprange.Range{}).String() != "*" {
		t.Errorf("the catch-all element is %s, %t and prints %s", p, ok, iprange.Range{})
	}
}

// "!" stands for an end, "*" for the catch-all element.
func TestBoundsFormRangesInAnyOrder(t *testing.T) {
	for _, tt := range []struct{ name, bounds, want string }{
		{"none", "", ""},
		{"one", "10.0.0.0 !11.0.0.0", "10.0.0.0/8"},
		{"without end", "240.0.0.0", "240.0.0.0/4"},
		{"everything", "0.0.0.0", "0.0.0.0/0"},
		{"last address", "255.255.255.255", "255.255.255.255"},
		{"neighbours", "10.0.0.0 !11.0.0.0 11.0.0.0 !12.0.0.0", "10.0.0.0/8 11.0.0.0/8"},
		{"up to the last", "128.0.0.0 !192.0.0.0 192.0.0.0", "128.0.0.0/2 192.0.0.0/2"},
		{"not a prefix", "10.0.0.1 !10.0.0.4", "10.0.0.1-10.0.0.3"},
		{"duplicates", "10.0.0.0 !11.0.0.0 10.0.0.0 !11.0.0.0", "10.0.0.0/8"},
		{"end lost", "10.0.0.0 13.0.0.0 !14.0.0.0", "10.0.0.0-12.255.255.255 13.0.0.0/8"},
		{"start lost", "!11.0.0.0 12.0.0.0 !13.0.0.0", "12.0.0.0/8"},
		{"catch-all element", "10.0.0.0 !11.0.0.0 *", "* 10.0.0.0/8"},
		{"IPv6", "fe80:: !fec0:: ::1 !::2", "::1 fe80::/10"},
		{"IPv6 without end", "8000::", "8000::/1"},
	} {
		for seed := range uint64(5) {
			var bounds []iprange.Bound
			for word := range strings.FieldsSeq(tt.bounds) {
				addr, _ := netip.ParseAddr(strings.TrimPrefix(word, "!"))
				bounds = append(bounds, iprange.Bound{Addr: addr, End: word[0] == '!'})
			}
			rand.New(rand.NewPCG(seed, 0)).Shuffle(len(bounds), func(i, j int) { bounds[i], bounds[j] = bounds[j], bounds[i] })
			if got := strings.Trim(fmt.Sprint(iprange.Pair(bounds)), "[]"); got != tt.want {
				t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
			}
		}
	}
}

// In a universe of few addresses, at both ends of both families, sets are compared with
// lists of their members.
func TestSetsMatchTheirMembers(t *testing.T) {
	var universe []netip.Addr
	for _, ipv6 := range []bool{false, true} {
		all := iprange.All(ipv6)
		for first, last, n := all.First, all.Last, 0; n < 5; first, last, n = first.Next(), last.Prev(), n+1 {
			universe = append(universe, first, last)
		}
	}
	slices.SortFunc(universe, netip.Addr.Compare)
	r := rand.New(rand.NewPCG(1, 2))
	random := func() (ranges []iprange.Range, members []bool) {
		members = make([]bool, len(universe))
		for range r.IntN(5) {
			from := r.IntN(len(universe))
			to := from + r.IntN(5)
			if to >= len(universe) || universe[from].Is4() != universe[to].Is4() {
				continue
			}
			ranges = append(ranges, iprange.Range{First: universe[from], Last: universe[to]})
			for i := from; i <= to; i++ {
				members[i] = true
			}
		}
		return iprange.Normal(ranges), members
	}
	check := func(set []iprange.Range, has func(i int) bool) {
		t.Helper()
		for i, a := range universe {
			if iprange.Contains(set, a) != has(i) {
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
		check(iprange.Intersect(a, b), func(i int) bool { return inA[i] && inB[i] })
		check(iprange.Subtract(a, b), func(i int) bool { return inA[i] && !inB[i] })
		var parts []netip.Prefix // which overlap and touch
		for _, r := range slices.Concat(a, b) {
			parts = append(parts, r.Prefixes()...)
		}
		check(iprange.SetOf(parts), func(i int) bool { return inA[i] || inB[i] })
	}
	if all := fmt.Sprint(iprange.All(false), iprange.All(true)); all != "0.0.0.0/0 ::/0" {
		t.Errorf("all addresses are %s", all)
	}
	if iprange.Contains([]iprange.Range{iprange.All(false)}, netip.Addr{}) {
		t.Error("an unknown address is in a set")
	}
}
