package judge

import (
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Region is the addresses between which connections are masqueraded, if they pass the right interfaces.
type Region struct{ Src, Dst Addresses }

// Empty reports whether there are no such connections.
func (r Region) Empty() bool { return len(r.Src) == 0 || len(r.Dst) == 0 }

// Masqueraded returns what a policy masquerades of a family.
func Masqueraded(f nft.FamilyPolicy) Region {
	anywhere := AllAddresses(f.IPv6)
	r := Region{Src: anywhere, Dst: anywhere}
	var forced Addresses
	for _, q := range f.Questions {
		listed := NewAddresses(q.Prefixes())
		switch {
		case q.Asks == config.SourceAddress && q.Outside:
			r.Src = r.Src.Intersect(listed)
		case q.Asks == config.SourceAddress:
			r.Src = r.Src.Subtract(listed)
		case q.Asks == config.DestinationAddress && q.Masquerade:
			forced = listed // whatever the conditions after it decide
		case q.Asks == config.DestinationAddress:
			r.Dst = r.Dst.Subtract(listed)
		}
	}
	r.Dst = r.Dst.Union(forced)
	return r
}
