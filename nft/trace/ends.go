package trace

import (
	"fmt"
	"net/netip"
	"slices"

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
		t.base = t.bases[0] // any, to know how long fields are
		for i := range c.Rules {
			all := rule.Statements(c.Rules[i])
			from, _ := prefixes(all)
			for s := range all {
				key, set, elements := s.Key, s.Expr.Set(), []element(nil)
				if s.NAT != nil {
					key, set = s.NAT.ToKey, s.NAT.ToMap
				}
				at := idOf(c.Chain, set)
				if of := t.sets[at]; of != nil {
					e.Exact = e.Exact || of.large
					if use := fmt.Sprint(at, key, from); !known[use] {
						known[use], elements = true, of.elements[:min(perSet, len(of.elements))]
					}
				} else if r, _ := s.Range(); isSource(s.Field) || isDestination(s.Field) {
					key, elements = []rule.Part{{Field: s.Field}}, []element{{from: r.From.AsSlice(), to: r.To.AsSlice()}}
				}
				e.add(t, c, elements, key, from)
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

// add adds the ends of what a key is compared with.
func (e *Ends) add(t *Tracer, c *Chain, all []element, key []rule.Part, from netip.Prefix) {
	for _, of := range all {
		at := 0
		for _, p := range key {
			size := t.fact(c, p).size
			if size == 0 || at+size > len(of.from) { // what comes after it is somewhere
				e.Exact = true
				break
			}
			first, _ := netip.AddrFromSlice(of.from[at : at+size])
			last, _ := netip.AddrFromSlice(of.to[at : at+size])
			ends := []netip.Addr{first}
			if next := last.Next(); next.IsValid() {
				ends = append(ends, next)
			}
			switch {
			case isDestination(p.Field):
				e.Exact, e.Dst = e.Exact || p.Mask != nil, append(e.Dst, ends...)
				e.of.add(from, ends...)
			case isSource(p.Field):
				e.Exact, e.Src = e.Exact || p.Mask != nil, append(e.Src, ends...)
			}
			at = (at + size + 3) &^ 3
		}
	}
}

// Of returns the destinations that rules for a source alone compare with.
func (e Ends) Of(src netip.Addr) []netip.Addr { return e.of.at(src) }
