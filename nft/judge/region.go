package judge

import (
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
)

// A Region is the addresses between which connections are masqueraded, if they pass the right interfaces.
type Region struct{ Src, Dst []iprange.Range }

// Empty reports whether there are no such connections.
func (r Region) Empty() bool { return len(r.Src) == 0 || len(r.Dst) == 0 }

// Masqueraded returns what a policy masquerades of a family.
func Masqueraded(f nft.FamilyPolicy) Region {
	anywhere := []iprange.Range{iprange.All(f.IPv6)}
	r := Region{Src: anywhere, Dst: anywhere}
	var forced []iprange.Range
	for _, q := range f.Questions {
		listed := iprange.SetOf(q.Prefixes())
		switch {
		case q.Asks == config.SourceAddress && q.Outside:
			r.Src = iprange.Intersect(r.Src, listed)
		case q.Asks == config.SourceAddress:
			r.Src = iprange.Subtract(r.Src, listed)
		case q.Asks == config.DestinationAddress && q.Masquerade:
			forced = listed // whatever the conditions after it decide
		case q.Asks == config.DestinationAddress:
			r.Dst = iprange.Subtract(r.Dst, listed)
		}
	}
	r.Dst = iprange.Normal(slices.Concat(r.Dst, forced))
	return r
}
