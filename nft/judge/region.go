package judge

import (
	"cmp"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
)

// A Region is a set of connections of one family that are not to the node itself: those
// of any origin, from any of the sources, by any of the interfaces, to any of the
// destinations. The conditions of a policy do not depend on each other, so what it
// masquerades is one region. The zero value has no connections.
type Region struct {
	Origin Names // the interfaces on which they are received; "" for what the node itself sends
	Src    []iprange.Range
	Out    Names // the interfaces by which they leave
	Dst    []iprange.Range
}

// Pods returns what is sent by sources that are pods according to a policy.
func Pods(f nft.FamilyPolicy) Region {
	f.Questions = slices.DeleteFunc(slices.Clone(f.Questions), func(q nft.Question) bool { return !q.LimitsSources() })
	r := Masqueraded(f)
	r.Origin = r.Origin.Minus(noName())
	return r
}

// Masqueraded returns what a policy masquerades of a family.
func Masqueraded(f nft.FamilyPolicy) Region {
	all := []iprange.Range{iprange.All(f.IPv6)}
	r := Region{Origin: allNames(), Src: all, Out: allNames(), Dst: all}
	var forced []iprange.Range
	for _, q := range f.Questions {
		switch q.Asks {
		case config.SentByNode:
			r.Origin = r.Origin.Minus(noName())
		case config.ReceivedOn:
			r.Origin = keepNames(q, r.Origin)
		case config.LeavingBy:
			r.Out = keepNames(q, r.Out)
		case config.SourceAddress:
			r.Src = keepAddresses(q, r.Src)
		case config.DestinationAddress:
			if q.Masquerade { // whatever the conditions after it decide
				forced = iprange.Intersect(r.Dst, iprange.SetOf(q.Prefixes()))
			} else {
				r.Dst = keepAddresses(q, r.Dst)
			}
		default:
			q.Unknown()
		}
	}
	if len(forced) > 0 {
		r.Dst = iprange.Normal(slices.Concat(r.Dst, forced))
	}
	if r.Empty() {
		return Region{}
	}
	return r
}

// keepNames returns the names that a condition does not exempt.
func keepNames(q nft.Question, of Names) Names {
	if q.Outside {
		return of.And(namesOf(q.Interfaces))
	}
	return of.Minus(namesOf(q.Interfaces))
}

// keepAddresses returns the addresses that a condition does not exempt.
func keepAddresses(q nft.Question, of []iprange.Range) []iprange.Range {
	if q.Outside {
		return iprange.Intersect(of, iprange.SetOf(q.Prefixes()))
	}
	return iprange.Subtract(of, iprange.SetOf(q.Prefixes()))
}

// Empty reports whether the region has no connections.
func (r Region) Empty() bool {
	return len(r.Origin) == 0 || len(r.Src) == 0 || len(r.Out) == 0 || len(r.Dst) == 0
}

// Includes reports whether a connection is in the region. An interface without a name is
// none of a list. It takes two binary searches, however long the lists of the policy are.
func (r Region) Includes(c nft.Connection) bool {
	in, out := cmp.Or(c.In, "*"), cmp.Or(c.Out, "*")
	if c.FromNode {
		in = ""
	}
	return !c.ToNode && iprange.Contains(r.Src, c.Src.Unmap()) && iprange.Contains(r.Dst, c.Dst.Unmap()) &&
		r.Origin.Has(in) && r.Out.Has(out)
}
