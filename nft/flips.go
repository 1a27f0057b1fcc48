package nft

import (
	"fmt"
	"net/netip"
	"slices"
)

// A Flip is connections whose verdict differs between two policies: those from any
// of the sources to any of the destinations.
type Flip struct {
	IPv6                  bool
	FromNode              bool // sent by this node itself; false: by others, or by any if no policy tells them apart
	Sources, Destinations []netip.Prefix
	AnySource             bool // the sources are the whole family
	Before, After         Verdict
}

// Flips returns where two policies decide differently, exactly: each connection
// that is not to the node itself and whose verdict differs is in one flip, and no
// other is in any. The order is that of the destinations.
func Flips(before, after Policy) []Flip {
	var flips []Flip
	for _, s := range sides(before, after) {
		src, dst := newAxis(s.ipv6, true, before, after), newAxis(s.ipv6, false, before, after)
		// Destinations that flip for the same sources in the same way belong together.
		groups := map[string][]int{}
		var order []string
		for d, to := range dst.members {
			column := ""
			for _, from := range src.members {
				c := Connection{Src: from, Dst: to, FromNode: s.fromNode}
				column += fmt.Sprintf("%s>%s ", before.Decide(c), after.Decide(c))
			}
			if groups[column] == nil {
				order = append(order, column)
			}
			groups[column] = append(groups[column], d)
		}
		for _, column := range order {
			flips = append(flips, flipsTo(groups[column], src, dst, before, after, s)...)
		}
	}
	return flips
}

// flipsTo returns the flips of destinations that flip alike.
func flipsTo(group []int, src, dst axis, before, after Policy, on side) []Flip {
	type pair struct{ before, after Verdict }
	var order []pair
	sources := map[pair][]int{}
	to := dst.members[group[0]]
	for s, from := range src.members {
		c := Connection{Src: from, Dst: to, FromNode: on.fromNode}
		p := pair{before.Decide(c), after.Decide(c)}
		if p.before == p.after {
			continue
		}
		if sources[p] == nil {
			order = append(order, p)
		}
		sources[p] = append(sources[p], s)
	}
	var flips []Flip
	for _, p := range order {
		flips = append(flips, Flip{
			IPv6: on.ipv6, FromNode: on.fromNode, Before: p.before, After: p.after,
			Sources:      src.prefixes(func(c int) bool { return slices.Contains(sources[p], c) }),
			Destinations: dst.prefixes(func(c int) bool { return slices.Contains(group, c) }),
			AnySource:    len(sources[p]) == len(src.members),
		})
	}
	return flips
}
