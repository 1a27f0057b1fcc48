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
	var found []Rewrite
	all := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	if w := search(s, all, &found); w.full() {
		found = append(found, Rewrite{Src: anywhere(nfnetlink.Inet), Dst: anywhere(nfnetlink.Inet)})
	}
	return found
}

// keep adds a rewrite. If all of them have too many ranges, it counts for any
// connection.
func (w *walker) keep(r Rewrite) {
	w.kept += len(r.Src) + len(r.Dst)
	if w.kept > maxKept {
		r.Src, r.Dst = anywhere(w.base.Family), anywhere(w.base.Family)
	}
	*w.rewrites = append(*w.rewrites, r)
}

// Meet reports whether one of the rules can match a connection. translated is whether
// its destination was translated.
func (all Rewrites) Meet(src, dst netip.Addr, translated bool) bool {
	holds := func(ranges []iprange.Range, a netip.Addr) bool {
		return slices.ContainsFunc(ranges, func(r iprange.Range) bool { return !a.Less(r.From) && !r.To.Less(a) })
	}
	return slices.ContainsFunc(all, func(r Rewrite) bool {
		return (translated || !r.Marked) && holds(r.Src, src) && holds(r.Dst, dst)
	})
}
