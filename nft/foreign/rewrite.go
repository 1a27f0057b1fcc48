package foreign

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// Rewrites are the connections about whose source address other programs' rules may have
// decided: they translate it, also to itself, or end the chain before it reaches ours.
type Rewrites struct {
	everything bool
	// Whose destination was not translated, and was: those may have the marks of
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

// FindRewrites finds the connections about which a rule, other than ours, may have decided,
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
		kept := 0 // ranges in them
		var above map[uint64]bool
		w.dst = anywhere(nfnetlink.Inet)
		w.visit = func(s step) {
			at := s.rule
			if len(s.via) > 0 {
				at = s.via[0]
			}
			inBase := len(s.via) == 0
			leaves := s.leaves(inBase) || inBase && s.verdict == unix.NFT_GOTO
			if w.translates(s.action) || above[at.Handle] && leaves {
				found = append(found, s.packets...)
				kept += s.size()
				w.full = kept > maxKept
			}
		}
		for i := range s.Chains {
			if c := &s.Chains[i]; c.Hook != nil && c.Hook.Type == "nat" && !c.Own {
				above = w.above(c)
				w.begin(c, allPackets(c.Family))
			}
		}
		if w.full {
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

// above returns the handles of the rules of a base chain that packets reach before our
// chain, none if no rule leads to it.
func (w *walker) above(base *Chain) map[uint64]bool {
	handles, seen := map[uint64]bool{}, map[id]bool{}
	for _, r := range base.Rules {
		if w.leadsToUs(r, seen) {
			return handles
		}
		handles[r.Handle] = true
	}
	return nil
}

// leadsToUs reports whether a rule leads to our chain, by chains that were not seen.
func (w *walker) leadsToUs(r nfnetlink.Rule, seen map[id]bool) bool {
	to, ok := rule.Target(r)
	at := id{r.Family, r.Table, to}
	c := w.chains[at]
	if !ok || c == nil || seen[at] {
		return false
	}
	seen[at] = true
	return c.Own || slices.ContainsFunc(c.Rules, func(r nfnetlink.Rule) bool { return w.leadsToUs(r, seen) })
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

// Meet reports whether one of the rules may have decided about a connection. translated is
// whether its destination was translated. It takes two binary searches.
func (r Rewrites) Meet(src, dst netip.Addr, translated bool) bool {
	areas := either(translated, r.translated, r.plain)
	next, found := slices.BinarySearchFunc(areas, src, func(a area, src netip.Addr) int { return a.from.Compare(src) })
	if found {
		next++
	}
	return r.everything || next > 0 && iprange.Contains(areas[next-1].dst, dst)
}
