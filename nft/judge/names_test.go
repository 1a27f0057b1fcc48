package judge

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"nft-masq-agent/config"
)

// Sets of names are compared with lists of their members. The names are in every
// combination of the patterns.
func TestNamesMatchTheirMembers(t *testing.T) {
	patterns := []string{"a", "a*", "ab", "ab*", "abc", "abc*", "b", "b*"}
	universe := []string{"", "a", "a-", "ab", "ab-", "abc", "abc-", "b", "b-", "c"}
	r := rand.New(rand.NewPCG(1, 2))
	members := func(has func(name string) bool) string {
		in := make([]bool, len(universe))
		for i, name := range universe {
			in[i] = has(name)
		}
		return fmt.Sprint(in)
	}
	equal := map[string]Names{}
	random := func() Names {
		n := allNames()
		for range r.IntN(5) {
			var list []config.Interface
			for range r.IntN(4) {
				list = append(list, config.Interface{Name: patterns[r.IntN(len(patterns))]})
			}
			listed := namesOf(list)
			in := func(name string) bool {
				return slices.ContainsFunc(list, func(i config.Interface) bool { return i.Matches(name) })
			}
			if got := members(listed.Has); got != members(in) {
				t.Fatalf("%v has %s, want %s", listed, got, members(in))
			}
			if r.IntN(2) == 0 {
				n = n.Minus(listed)
			} else {
				n = allNames().Minus(n).Minus(listed)
			}
		}
		return n
	}
	for range 5_000 {
		a, b := random(), random()
		for got, has := range map[*Names]func(string) bool{
			new(a.Minus(b)): func(name string) bool { return a.Has(name) && !b.Has(name) },
			new(a.And(b)):   func(name string) bool { return a.Has(name) && b.Has(name) },
		} {
			in := members(got.Has)
			if in != members(has) {
				t.Fatalf("%v and %v: %v has %s, want %s", a, b, *got, in, members(has))
			}
			if known, ok := equal[in]; ok && !slices.Equal(known, *got) {
				t.Fatalf("%v and %v are equal", known, *got)
			}
			equal[in] = *got
			if (len(*got) == 0) != (in == members(Names{}.Has)) || slices.Equal(*got,
				allNames()) != (in == members(allNames().Has)) {
				t.Fatalf("%v has %s", *got, in)
			}
			if got.Has("*") != got.Has("c") {
				t.Fatalf("%v: * stands for no other name", *got)
			}
		}
	}
	if len(equal) < 200 {
		t.Errorf("only %d sets", len(equal))
	}
}
