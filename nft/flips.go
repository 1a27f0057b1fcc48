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
	// All others of the family: none if they are the whole family.
	OtherSources, OtherDestinations []netip.Prefix
	Before, After                   Verdict

	apart          bool // FromNode counts
	src, dst       axis
	froms, targets []int // classes of the sources and of the destinations
}

// Includes reports whether a connection is in the flip.
func (f *Flip) Includes(c Connection) bool {
	src, dst := c.Src.Unmap(), c.Dst.Unmap()
	return !c.ToNode && (c.FromNode == f.FromNode || !f.apart) && src.Is6() == f.IPv6 && dst.Is6() == f.IPv6 &&
		slices.Contains(f.froms, f.src.class(src)) && slices.Contains(f.targets, f.dst.class(dst))
}

// Flips returns where two policies decide differently, exactly: each connection
// that is not to the node itself and whose verdict differs is in one flip, and no
// other is in any. The order is that of the destinations.
func Flips(before, after Policy) []Flip {
	var flips []Flip
	all := sides(before, after)
	for _, s := range all {
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
	for i := range flips {
		flips[i].apart = slices.ContainsFunc(all, func(s side) bool { return s.fromNode })
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
		from := func(c int) bool { return slices.Contains(sources[p], c) }
		target := func(c int) bool { return slices.Contains(group, c) }
		flips = append(flips, Flip{
			IPv6: on.ipv6, FromNode: on.fromNode, Before: p.before, After: p.after,
			Sources: src.prefixes(from), OtherSources: src.prefixes(not(from)),
			Destinations: dst.prefixes(target), OtherDestinations: dst.prefixes(not(target)),
			src: src, dst: dst, froms: sources[p], targets: group,
		})
	}
	return flips
}

func not(f func(int) bool) func(int) bool { return func(n int) bool { return !f(n) } }
