package foreign

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// Rewrites are the connections whose source address other programs' rules can rewrite.
type Rewrites struct {
	all []area
	// Only if their destination was translated: by rules for packets marked by
	// kube-proxy or the CNI plugin portmap, which mark those.
	marked []area
}

// An area is the connections from sources at least as great as from, and less than that of
// the next area, to some destinations (after DNAT).
type area struct {
	from netip.Addr
	dst  []iprange.Range
}

// FindRewrites finds the connections whose source address a rule, other than ours, can
// rewrite, whether or not our policy exempts it. A condition that it does not
// understand may be true or false. These are all connections if there are rules that were
// not read, or tens of thousands of ranges.
func FindRewrites(s Snapshot) Rewrites {
	found := map[bool]packets{} // by whether they are marked
	kept := 0                   // ranges in them
	w := newWalker(s)
	w.dst = anywhere(nfnetlink.Inet)
	w.visit = func(c *Chain, _ nfnetlink.Rule, q path, a action) {
		if a.Source {
			marked := markedForIt(c, q.marks)
			found[marked] = append(found[marked], q.packets...)
			kept += q.size()
			w.full = kept > maxKept
		}
	}
	w.walkAll()
	if w.full || s.Unread > 0 {
		return Rewrites{all: []area{{dst: anywhere(nfnetlink.Inet)}}}
	}
	return Rewrites{all: areas(found[false]), marked: areas(found[true])}
}

// areas sorts packets by their sources. If there are too many to compare, it adds others.
func areas(p packets) (all []area) {
	type span struct {
		iprange.Range
		dst []iprange.Range
	}
	var spans, active []span // active: those that have the source at hand
	var starts []netip.Addr
	for _, b := range p {
		for _, r := range b.src {
			spans, starts = append(spans, span{r, b.dst}), append(starts, r.From)
			if next := r.To.Next(); next.IsValid() {
				starts = append(starts, next)
			}
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return a.From.Compare(b.From) })
	slices.SortFunc(starts, netip.Addr.Compare)
	work := 0
	for _, start := range slices.Compact(starts) {
		active = slices.DeleteFunc(active, func(s span) bool { return s.To.Less(start) })
		for ; len(spans) > 0 && spans[0].From == start; spans = spans[1:] {
			active = append(active, spans[0])
		}
		var dst []iprange.Range
		for _, s := range active {
			dst = append(dst, s.dst...)
		}
		if work += len(active) + len(dst); work > maxWork {
			return append(all, area{start, anywhere(nfnetlink.Inet)})
		}
		if dst = iprange.Normal(dst); len(all) == 0 || !slices.Equal(all[len(all)-1].dst, dst) {
			all = append(all, area{start, slices.Clip(dst)})
		}
	}
	return all
}

// Everything reports whether these are all connections, because there are rules that were not
// read, or too many.
func (r Rewrites) Everything() bool { return len(r.all) == 1 && !r.all[0].from.IsValid() }

// Meet reports whether one of the rules can match a connection. translated is whether
// its destination was translated. It takes two or four binary searches.
func (r Rewrites) Meet(src, dst netip.Addr, translated bool) bool {
	return meet(r.all, src, dst) || translated && meet(r.marked, src, dst)
}

func meet(areas []area, src, dst netip.Addr) bool {
	next, found := slices.BinarySearchFunc(areas, src, func(a area, src netip.Addr) int { return a.from.Compare(src) })
	if found {
		next++
	}
	return next > 0 && iprange.Contains(areas[next-1].dst, dst)
}
