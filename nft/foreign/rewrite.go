package foreign

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
)

// A Rewrite describes connections whose source address another program's rule can
// rewrite.
type Rewrite struct {
	Src, Dst []iprange.Range // Dst after DNAT
	// Marked means that the rule is for packets marked by kube-proxy or the CNI
	// plugin portmap, which mark those whose destination they translate.
	Marked bool
}

// Rewrites finds all rules, other than ours, that can rewrite the source address
// of a connection, whether or not our policy exempts it. A condition that it does
// not understand may be true or false.
func Rewrites(s Snapshot) []Rewrite {
	var found []Rewrite
	search(s, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}, &found)
	return found
}

// Meets reports whether the rule can match a connection. translated is whether
// its destination was translated.
func (r Rewrite) Meets(src, dst netip.Addr, translated bool) bool {
	holds := func(ranges []iprange.Range, a netip.Addr) bool {
		return slices.ContainsFunc(ranges, func(r iprange.Range) bool { return !a.Less(r.From) && !r.To.Less(a) })
	}
	return (translated || !r.Marked) && holds(r.Src, src) && holds(r.Dst, dst)
}
