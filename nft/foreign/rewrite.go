package foreign

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// A Rewrite describes connections whose source address another program's rule can
// rewrite.
type Rewrite struct {
	Src, Dst []iprange.Range // Dst after DNAT
	// Marked means that the rule is for packets marked by kube-proxy or the CNI
	// plugin portmap, which mark those whose destination they translate.
	Marked bool
}

// Rewrites are those of several rules.
type Rewrites []Rewrite

// FindRewrites finds all rules, other than ours, that can rewrite the source address
// of a connection, whether or not our policy exempts it. A condition that it does
// not understand may be true or false. After a few thousand rules, the last result
// stands for all others: any connection.
func FindRewrites(s Snapshot) Rewrites {
	var found Rewrites
	kept := 0 // ranges in them
	w := newWalker(s)
	w.dst = anywhere(nfnetlink.Inet)
	w.visit = func(c *Chain, _ nfnetlink.Rule, q path, a action) {
		if !a.Source {
			return
		}
		if kept += q.size(); kept > maxKept {
			q.packets = allPackets(w.base.Family)
		}
		for _, b := range q.packets {
			found = append(found, Rewrite{Src: b.src, Dst: b.dst, Marked: markedForIt(c, q.marks)})
		}
		w.full = len(found) >= maxFound
	}
	w.walkAll()
	if w.full {
		found = append(found, Rewrite{Src: anywhere(nfnetlink.Inet), Dst: anywhere(nfnetlink.Inet)})
	}
	return found
}

// Meet reports whether one of the rules can match a connection. translated is whether
// its destination was translated.
func (all Rewrites) Meet(src, dst netip.Addr, translated bool) bool {
	return slices.ContainsFunc(all, func(r Rewrite) bool {
		return (translated || !r.Marked) && iprange.Contains(r.Src, src) && iprange.Contains(r.Dst, dst)
	})
}
