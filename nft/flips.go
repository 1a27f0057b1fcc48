package nft

import (
	"fmt"
	"net/netip"
	"slices"
)

// A Flip is a set of connections whose verdict differs between two policies:
// those from any of the sources to any of the destinations, by any of the
// interfaces.
type Flip struct {
	IPv6                  bool
	FromNode              bool // sent by this node; false: not, or either if no policy distinguishes them
	In, Out               Interfaces
	Sources, Destinations []netip.Prefix
	// The rest of the family; empty if the lists are the whole family.
	OtherSources, OtherDestinations []netip.Prefix
	Before, After                   Verdict

	board          board
	ins, outs      []int // classes of the interfaces
	src, dst       axis
	froms, targets []int // classes of the sources and of the destinations
}

// Interfaces are names and prefixes of interfaces. The zero value means every
// interface.
type Interfaces struct {
	Names []string
	But   bool // all except these
}

// interfaces returns the interfaces of some classes.
func (a nameAxis) interfaces(classes []int) Interfaces {
	others := slices.Contains(classes, 0)
	i := Interfaces{But: others}
	for class, names := range a.names {
		if class > 0 && slices.Contains(classes, class) != others {
			i.Names = append(i.Names, names...)
		}
	}
	if len(i.Names) == 0 {
		return Interfaces{}
	}
	slices.Sort(i.Names)
	return i
}

// Includes reports whether a connection is in the flip.
func (f *Flip) Includes(c Connection) bool {
	src, dst, s := c.Src.Unmap(), c.Dst.Unmap(), f.board.side(c)
	return !c.ToNode && s.fromNode == f.FromNode && src.Is6() == f.IPv6 && dst.Is6() == f.IPv6 &&
		slices.Contains(f.ins, s.in) && slices.Contains(f.outs, s.out) &&
		slices.Contains(f.froms, f.src.class(src)) && slices.Contains(f.targets, f.dst.class(dst))
}

// Flips returns the exact differences between the decisions of two policies: each
// connection that is not to the node itself and whose verdict differs is in one
// flip, and no other connection is in any. They are sorted by destination.
func Flips(before, after Policy) []Flip {
	var flips []Flip
	b := newBoard(before, after)
	for _, ipv6 := range []bool{false, true} {
		c := comparison{
			before: before, after: after, board: b,
			src: newAxis(ipv6, true, before, after), dst: newAxis(ipv6, false, before, after),
		}
		for _, fromNode := range []bool{false, true} {
			flips = append(flips, c.flips(ipv6, fromNode)...)
		}
	}
	return flips
}

// A comparison compares two policies for one address family.
type comparison struct {
	before, after Policy
	board         board
	src, dst      axis
}

// flips merges sides that flip alike.
func (c comparison) flips(ipv6, fromNode bool) []Flip {
	columns := map[side][]string{}
	var sides []side
	for _, s := range c.board.sides(ipv6) {
		if s.fromNode == fromNode {
			sides, columns[s] = append(sides, s), c.columns(s)
		}
	}
	var flips []Flip
	done := map[side]bool{}
	for _, s := range sides {
		if done[s] {
			continue
		}
		alike := func(in, out int) bool {
			o := side{ipv6, fromNode, in, out}
			other, known := columns[o]
			return known && !done[o] && slices.Equal(other, columns[s])
		}
		var ins, outs []int
		for out := range c.board.out.members {
			if alike(s.in, out) {
				outs = append(outs, out)
			}
		}
		for in := range c.board.in.members {
			if !slices.ContainsFunc(outs, func(out int) bool { return !alike(in, out) }) {
				ins = append(ins, in)
			}
		}
		for _, in := range ins {
			for _, out := range outs {
				done[side{ipv6, fromNode, in, out}] = true
			}
		}
		for _, f := range c.flipsOf(s, columns[s]) {
			f.board, f.ins, f.outs = c.board, ins, outs
			f.Out = c.board.out.interfaces(outs)
			if !fromNode {
				f.In = c.board.in.interfaces(ins)
			}
			flips = append(flips, f)
		}
	}
	return flips
}

// columns returns, for each class of destinations, the verdicts for all classes
// of sources, before and after.
func (c comparison) columns(s side) []string {
	out := make([]string, len(c.dst.members))
	for d, to := range c.dst.members {
		for _, from := range c.src.members {
			conn := c.board.connection(s, from, to)
			out[d] += fmt.Sprintf("%s>%s ", c.before.Decide(conn), c.after.Decide(conn))
		}
	}
	return out
}

// flipsOf returns the flips of a side. Destinations that flip in the same way for
// the same sources are merged.
func (c comparison) flipsOf(s side, columns []string) []Flip {
	groups := map[string][]int{}
	var order []string
	for d, column := range columns {
		if groups[column] == nil {
			order = append(order, column)
		}
		groups[column] = append(groups[column], d)
	}
	var flips []Flip
	for _, column := range order {
		flips = append(flips, c.flipsTo(groups[column], s)...)
	}
	return flips
}

// flipsTo returns the flips of destinations that flip alike.
func (c comparison) flipsTo(group []int, on side) []Flip {
	type pair struct{ before, after Verdict }
	var order []pair
	sources := map[pair][]int{}
	to := c.dst.members[group[0]]
	for s, from := range c.src.members {
		conn := c.board.connection(on, from, to)
		p := pair{c.before.Decide(conn), c.after.Decide(conn)}
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
			Sources: c.src.prefixes(from), OtherSources: c.src.prefixes(not(from)),
			Destinations: c.dst.prefixes(target), OtherDestinations: c.dst.prefixes(not(target)),
			src: c.src, dst: c.dst, froms: sources[p], targets: group,
		})
	}
	return flips
}

func not(f func(int) bool) func(int) bool { return func(n int) bool { return !f(n) } }
