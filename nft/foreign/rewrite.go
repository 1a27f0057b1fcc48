package foreign

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// Rewrites are the connections that other programs' rules may have affected: they translate the
// source address, also to itself, or end the chain before it reaches ours.
type Rewrites struct {
	everything bool
	// By whether the destination was translated: if it was, they may have the marks of
	// kube-proxy or the CNI plugin portmap.
	plain, translated []area
}

// An area is the connections from sources at least as great as from, and less than that of
// the next area, to some destinations (after DNAT).
type area struct {
	from netip.Addr
	dst  []iprange.Range
}

// Everything reports whether these are all connections, because there are rules that were
// not read, or too many ranges of addresses.
func (r Rewrites) Everything() bool { return r.everything }

// FindRewrites finds the connections that a rule, other than ours, may have affected,
// whether or not our policy exempts them. A condition that it does not understand may be
// true or false. Of connections to the node itself, and of rules in legacy ip_tables (see
// [LegacyRules]), it knows nothing.
func FindRewrites(s Snapshot) Rewrites {
	if s.Unread > 0 {
		return Rewrites{everything: true}
	}
	r := Rewrites{}
	for _, marked := range []bool{false, true} {
		w := newWalker(s, Packet{any: true, marked: marked})
		var found packets
		kept := 0  // ranges in them
		above := 0 // how many rules of the base chain that packets reach before our chain
		w.dst = anywhere(nfnetlink.Inet)
		w.visit = func(s step) {
			inBase := len(s.via) == 0
			leaves := s.leaves(inBase) || inBase && s.verdict == unix.NFT_GOTO
			if w.translates(s.action) || leaves && w.examined[chainID(w.base)] <= above {
				found = append(found, s.packets...)
				kept += s.size()
				w.full = kept > maxKept
			}
		}
		for _, c := range w.bases() {
			if c.Hook.Type == "nat" {
				above = w.jump(c, false)
				w.begin(c, allPackets(c.Family))
			}
		}
		if w.full || w.spent() {
			return Rewrites{everything: true}
		}
		if marked {
			r.translated = areas(found)
		} else {
			r.plain = areas(found)
		}
	}
	return r
}

// areas sorts packets by their sources. If there are too many to compare, it adds others.
func areas(p packets) (all []area) {
	var starts []netip.Addr
	for _, b := range p {
		for _, r := range b.src {
			starts = append(starts, r.From)
			if next := r.To.Next(); next.IsValid() {
				starts = append(starts, next)
			}
		}
	}
	slices.SortFunc(starts, netip.Addr.Compare)
	slices.SortStableFunc(p, func(a, b box) int { return a.src[0].From.Compare(b.src[0].From) })
	var active packets // those that may have the source at hand
	work := 0
	for _, start := range slices.Compact(starts) {
		for ; len(p) > 0 && !start.Less(p[0].src[0].From); p = p[1:] {
			active = append(active, p[0])
		}
		active = slices.DeleteFunc(active, func(b box) bool { return b.src[len(b.src)-1].To.Less(start) })
		var dst []iprange.Range
		for _, b := range active {
			if iprange.Contains(b.src, start) {
				dst = append(dst, b.dst...)
			}
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

// Meet reports whether one of the rules may have affected a connection. translated is
// whether its destination was translated. It takes two binary searches.
func (r Rewrites) Meet(src, dst netip.Addr, translated bool) bool {
	areas := either(translated, r.translated, r.plain)
	next, found := slices.BinarySearchFunc(areas, src, func(a area, src netip.Addr) int { return a.from.Compare(src) })
	if found {
		next++
	}
	return r.everything || next > 0 && iprange.Contains(areas[next-1].dst, dst)
}
