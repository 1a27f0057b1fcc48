package trace

import (
	"iter"
	"net/netip"
	"slices"

	"nft-masq-agent/nft/rule"
)

// A byPrefix has things by the prefix of the addresses that they are for, and the rest for any.
type byPrefix[T any] struct {
	of      map[netip.Prefix][]T
	lengths map[int]bool // of the prefixes
	rest    []T
}

// add adds things for a prefix, the zero value for any address.
func (b *byPrefix[T]) add(p netip.Prefix, all ...T) {
	if !p.IsValid() {
		b.rest = append(b.rest, all...)
		return
	}
	if b.of == nil {
		b.of, b.lengths = map[netip.Prefix][]T{}, map[int]bool{}
	}
	b.of[p], b.lengths[p.Bits()] = append(b.of[p], all...), true
}

// at returns what is for the prefixes of an address.
func (b *byPrefix[T]) at(a netip.Addr) (all []T) {
	for bits := range b.lengths {
		p, _ := a.Prefix(bits)
		all = append(all, b.of[p]...)
	}
	return all
}

// An index has the rules of a chain by the prefix that they compare an address with: the others
// have no bearing on a packet with another address.
type index struct{ src, dst byPrefix[int] }

// meets returns the rules of a chain that have a bearing on the packet.
func (t *Tracer) meets(c *Chain) []int {
	if c.index == nil {
		c.index = &index{}
		for i := range c.Rules {
			if src, dst := prefixes(rule.Statements(c.Rules[i])); src.Bits() > dst.Bits() {
				c.index.src.add(src, i)
			} else {
				c.index.dst.add(dst, i)
			}
		}
	}
	found := slices.Concat(c.index.dst.rest, c.index.dst.at(t.packet.Dst), c.index.src.at(t.packet.Src))
	if !t.packet.Src.IsValid() { // it may be any
		for _, all := range c.index.src.of {
			found = append(found, all...)
		}
	}
	slices.Sort(found)
	return found
}

// prefixes returns those that a rule compares addresses with before it does anything.
func prefixes(of iter.Seq[rule.Statement]) (src, dst netip.Prefix) {
	for s := range of {
		r, ok := s.Range()
		p, is := r.Prefix()
		switch {
		case s.Field == "":
			return src, dst
		case !ok, !is, s.Op != "==":
		case isSource(s.Field):
			src = p
		case isDestination(s.Field):
			dst = p
		}
	}
	return src, dst
}
