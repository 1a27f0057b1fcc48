package trace

import (
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/rule"
)

// Ends are where rules tell addresses apart: each is the first of those that they treat alike, up
// to the next one. They come from what the rules compare addresses with.
type Ends struct {
	src, dst []netip.Addr // sorted
	// Exact means that a rule tells addresses apart in another way, such as by a mask that is no
	// prefix: only equal ones are alike.
	Exact bool
}

// Ends returns the ends of all rules that were read. Of a set with more elements than perSet it
// knows only the first ones.
func (t *Tracer) Ends(perSet int) (e Ends) {
	known := map[string]bool{} // sets by what is looked up in them
	for _, c := range t.Chains {
		for i := range c.Rules {
			all := t.statements(c, i)
			if hairpin(all) {
				continue
			}
			for _, s := range all {
				e.compared(s)
				for _, m := range []struct {
					set string
					key []rule.Part
				}{{s.Set, s.Key}, {s.Expr.Set(), s.Key}, {s.ToMap, s.ToKey}} {
					at := id{c.Family, c.Table, m.set}
					if of, use := t.sets[at], fmt.Sprint(at, m.key); of != nil && !known[use] {
						known[use] = true
						e.keys(of.elements[:min(perSet, len(of.elements))], m.key)
					}
					e.Exact = e.Exact || t.large[at]
				}
			}
		}
	}
	for _, list := range []*[]netip.Addr{&e.src, &e.dst} {
		*list = append(*list, netip.IPv4Unspecified(), netip.IPv6Unspecified())
		slices.SortFunc(*list, netip.Addr.Compare)
		*list = slices.Compact(*list)
	}
	return e
}

// hairpin reports whether a rule is only for connections from an address to itself.
func hairpin(all []rule.Statement) bool {
	var of [2]iprange.Range // the source and the destination
	for _, s := range all {
		if r, ok := s.Range(); ok && s.Op == "==" && r.From == r.To {
			of[map[bool]int{true: 1}[isDestination(s.Field)]] = r
		}
	}
	return of[0].From.IsValid() && of[0] == of[1]
}

// compared adds the ends of a comparison.
func (e *Ends) compared(s rule.Statement) {
	if !isDestination(s.Field) && !isSource(s.Field) {
		return
	}
	if r, ok := s.Range(); ok {
		e.add(s.Field, r)
	} else if s.Set == "" || s.Mask != nil {
		e.Exact = true
	}
}

// keys adds the ends of the keys of a set.
func (e *Ends) keys(all []element, key []rule.Part) {
	at := 0
	for _, p := range key {
		size := sizes[p.Field]
		if size == 0 { // and what comes after it is somewhere
			e.Exact = true
			return
		}
		if isDestination(p.Field) || isSource(p.Field) {
			e.Exact = e.Exact || p.Mask != nil
			for _, of := range all {
				if at+size > len(of.from) || at+size > len(of.to) {
					e.Exact = true
					break
				}
				from, _ := netip.AddrFromSlice(of.from[at : at+size])
				to, _ := netip.AddrFromSlice(of.to[at : at+size])
				e.add(p.Field, iprange.Range{From: from, To: to})
			}
		}
		at = (at + size + 3) &^ 3
	}
}

func (e *Ends) add(field string, r iprange.Range) {
	list := &e.src
	if isDestination(field) {
		list = &e.dst
	}
	*list = append(*list, r.From)
	if next := r.To.Next(); next.IsValid() {
		*list = append(*list, next)
	}
}

// Alike returns a source and a destination that the rules treat like the given ones.
func (e Ends) Alike(src, dst netip.Addr) (netip.Addr, netip.Addr) {
	from, to := first(e.src, src), first(e.dst, dst)
	if e.Exact || src == dst || from == to {
		return src, dst
	}
	return from, to
}

// first returns the first of the addresses that are alike.
func first(ends []netip.Addr, a netip.Addr) netip.Addr {
	i, found := slices.BinarySearchFunc(ends, a, netip.Addr.Compare)
	if !found && i > 0 {
		i--
	}
	return ends[i]
}

// Sources returns one address of each group that the rules treat alike, as far as it has any in
// a set: one of the preferred ones, if they are in it.
func (e Ends) Sources(of []iprange.Range, prefer []netip.Addr) []netip.Addr {
	return samples(e.src, of, prefer, 1)
}

// Destinations is like Sources.
func (e Ends) Destinations(of []iprange.Range) []netip.Addr { return samples(e.dst, of, nil, 2) }

// samples takes the address at a place of each group, so that sources and destinations differ: the
// first one, at 0, is that of a network.
func samples(ends []netip.Addr, of []iprange.Range, prefer []netip.Addr, place int) (all []netip.Addr) {
	groups := make([]iprange.Range, len(ends))
	for i, a := range ends {
		groups[i] = iprange.Range{From: a, To: iprange.All(a.Is6()).To}
		if i+1 < len(ends) && ends[i+1].Is6() == a.Is6() {
			groups[i].To = ends[i+1].Prev()
		}
	}
	preferred := map[netip.Addr]netip.Addr{} // by the first of their groups
	for _, a := range prefer {
		if iprange.Contains(of, a) {
			preferred[first(ends, a)] = a
		}
	}
	last := netip.Addr{}
	for _, r := range iprange.Intersect(groups, of) {
		group := first(ends, r.From)
		if group == last { // another part of it
			continue
		}
		last = group
		a, ok := preferred[group]
		if !ok {
			a = r.From
			for n := 0; n < place && a != r.To; n++ {
				a = a.Next()
			}
		}
		all = append(all, a)
	}
	return all
}
