package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/rule"
)

// Ends are where rules tell addresses apart: each is the first of those that they treat alike, up
// to the next one. They come from what the rules compare addresses with.
type Ends struct {
	Src, Dst []netip.Addr // sorted, from the first address of each family on
	Common   []netip.Addr // the destinations of rules that are not for certain sources
	// Exact means that a rule tells addresses apart in another way, such as by a mask that is no
	// prefix: only equal ones are alike.
	Exact bool
	of    byPrefix[netip.Addr] // the other destinations, by the sources of their rules
}

// Ends returns the ends of all rules that were read. Of a set with more elements than perSet it
// knows only the first ones.
func (t *Tracer) Ends(perSet int) (e Ends) {
	known := map[string]bool{} // sets by what is looked up in them
	for _, c := range t.Chains {
		for i := range c.Rules {
			all := t.statements(c, i)
			from, _ := prefixes(all)
			for s := range all {
				if isSource(s.Field) || isDestination(s.Field) {
					r, ok := s.Range()
					if e.Exact = e.Exact || !ok && (s.Set == "" || s.Mask != nil); ok {
						e.add(s.Field, r, from)
					}
				}
				at, key := idOf(c.Chain, cmp.Or(s.ToMap, s.Expr.Set())), slices.Concat(s.Key, s.ToKey)
				of := t.sets[at]
				e.Exact = e.Exact || t.large[at]
				if of == nil {
					continue
				}
				if use := fmt.Sprint(at, key, from); !known[use] {
					known[use] = true
					e.keys(of.elements[:min(perSet, len(of.elements))], key, from)
				}
			}
		}
	}
	e.Src, e.Dst, e.Common = Sorted(e.Src), Sorted(e.Dst), Sorted(e.of.rest)
	return e
}

// Sorted returns ends once each, with the first address of each family.
func Sorted(of []netip.Addr) []netip.Addr {
	of = append(of, netip.IPv4Unspecified(), netip.IPv6Unspecified())
	slices.SortFunc(of, netip.Addr.Compare)
	return slices.Compact(of)
}

// keys adds the ends of the keys of a set. An element with a source is only for that.
func (e *Ends) keys(all []element, key []rule.Part, from netip.Prefix) {
	for _, of := range all {
		at, from := 0, from
		for _, p := range key {
			size := sizes[p.Field]
			if size == 0 || at+size > min(len(of.from), len(of.to)) { // what comes after it is somewhere
				e.Exact = true
				break
			}
			if isDestination(p.Field) || isSource(p.Field) {
				e.Exact = e.Exact || p.Mask != nil
				first, _ := netip.AddrFromSlice(of.from[at : at+size])
				last, _ := netip.AddrFromSlice(of.to[at : at+size])
				r := iprange.Range{From: first, To: last}
				if e.add(p.Field, r, from); isSource(p.Field) && p.Mask == nil {
					if only, ok := r.Prefix(); ok {
						from = only
					}
				}
			}
			at = (at + size + 3) &^ 3
		}
	}
}

func (e *Ends) add(field string, r iprange.Range, from netip.Prefix) {
	ends := []netip.Addr{r.From}
	if next := r.To.Next(); next.IsValid() {
		ends = append(ends, next)
	}
	if isSource(field) {
		e.Src = append(e.Src, ends...)
		return
	}
	e.Dst = append(e.Dst, ends...)
	e.of.add(from, ends...)
}

// Of returns the destinations that rules for a source alone compare with.
func (e Ends) Of(src netip.Addr) []netip.Addr { return e.of.at(src) }
