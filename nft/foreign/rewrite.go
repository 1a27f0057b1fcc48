package foreign

import (
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
)

// A Rewrite is connections whose source address a rule of another program can
// rewrite.
type Rewrite struct {
	Src, Dst []iprange.Range // Dst after DNAT
	// Marked says that the rule is for packets that kube-proxy or the CNI plugin
	// portmap has marked, which they do to those whose destination they translate.
	Marked bool
}

// Rewrites finds all rules, other than ours, that can rewrite the source address of
// a connection, whether our policy exempts it or not. A condition that it knows
// nothing of may hold or not.
func Rewrites(s Snapshot) []Rewrite {
	var found []Rewrite
	conflicts(s, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}, &found)
	return found
}

// Meets reports whether the rule can meet a connection. translated says that its
// destination was translated.
func (r Rewrite) Meets(src, dst netip.Addr, translated bool) bool {
	holds := func(ranges []iprange.Range, a netip.Addr) bool {
		return slices.ContainsFunc(ranges, func(r iprange.Range) bool { return !a.Less(r.From) && !r.To.Less(a) })
	}
	return (translated || !r.Marked) && holds(r.Src, src) && holds(r.Dst, dst)
}
