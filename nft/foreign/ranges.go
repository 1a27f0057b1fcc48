package foreign

import (
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// anywhere returns all addresses of a family; inet includes both families.
func anywhere(f nfnetlink.Family) []iprange.Range {
	switch f {
	case nfnetlink.IPv4:
		return []iprange.Range{iprange.All(false)}
	case nfnetlink.IPv6:
		return []iprange.Range{iprange.All(true)}
	}
	return []iprange.Range{iprange.All(false), iprange.All(true)}
}

func covers(set, part []iprange.Range) bool { return len(iprange.Subtract(part, set)) == 0 }

// packets is a set of packets by their addresses: those of some boxes.
type packets []box

// A box is the packets from a set of addresses to another set, both of one family;
// nil: any.
type box struct{ src, dst []iprange.Range }

// allPackets returns all packets of a family; inet includes both families.
func allPackets(f nfnetlink.Family) (all packets) {
	for _, r := range anywhere(f) {
		all = append(all, box{[]iprange.Range{r}, []iprange.Range{r}})
	}
	return all
}

// in returns the packets from some addresses to some addresses; nil: any.
func (p packets) in(src, dst []iprange.Range) (out packets) {
	for _, b := range p {
		if src != nil {
			b.src = iprange.Intersect(b.src, src)
		}
		if dst != nil {
			b.dst = iprange.Intersect(b.dst, dst)
		}
		if len(b.src) > 0 && len(b.dst) > 0 {
			out = append(out, b)
		}
	}
	return out
}

// without returns the packets that are in none of the boxes.
func (p packets) without(boxes ...box) packets {
	for _, gone := range boxes {
		var rest packets
		for _, b := range p {
			both := packets{b}.in(gone.src, gone.dst)
			if len(both) == 0 {
				rest = append(rest, b)
				continue
			}
			if others := iprange.Subtract(b.src, both[0].src); len(others) > 0 {
				rest = append(rest, box{others, b.dst})
			}
			if others := iprange.Subtract(b.dst, both[0].dst); len(others) > 0 {
				rest = append(rest, box{both[0].src, others})
			}
		}
		p = rest
	}
	return p
}

// and returns the union of two sets, or something else if it has too many boxes.
func (p packets) and(more, otherwise packets) packets {
	p = slices.Clone(p) // another set may have the same boxes
	for _, b := range more {
		same := func(o box) bool { return slices.Equal(o.src, b.src) }
		if i := slices.IndexFunc(p, same); i >= 0 {
			p[i].dst = iprange.Normal(slices.Concat(p[i].dst, b.dst))
		} else if p = append(p, b); len(p) > maxBoxes {
			return otherwise
		}
	}
	return p
}

// size returns the number of ranges in all boxes.
func (p packets) size() (n int) {
	for _, b := range p {
		n += len(b.src) + len(b.dst)
	}
	return n
}

func (p packets) addresses() (src, dst []iprange.Range) {
	for _, b := range p {
		src, dst = append(src, b.src...), append(dst, b.dst...)
	}
	return iprange.Normal(src), iprange.Normal(dst)
}
