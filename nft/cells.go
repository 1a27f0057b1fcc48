package nft

import (
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/iprange"
)

// An axis cuts the addresses of a family where the answer to a question can
// change: into cells, and cells in which every question has the same answer into
// one class.
type axis struct {
	starts  []netip.Addr // of the cells, in order
	classes []int        // of the cells
	members []netip.Addr // one address of each class
}

// newAxis cuts the sources or the destinations at the lists of all policies.
func newAxis(ipv6, source bool, policies ...Policy) axis {
	first := netip.IPv4Unspecified()
	if ipv6 {
		first = netip.IPv6Unspecified()
	}
	lists := listsOf(ipv6, source, policies)
	a := axis{starts: []netip.Addr{first}}
	for _, list := range lists {
		for _, p := range list {
			a.starts = append(a.starts, p.Addr())
			if next := iprange.Of(p).To.Next(); next.IsValid() {
				a.starts = append(a.starts, next)
			}
		}
	}
	slices.SortFunc(a.starts, netip.Addr.Compare)
	a.starts = slices.Compact(a.starts)
	// A class is the set of lists that hold an address, refined list by list.
	a.classes = make([]int, len(a.starts))
	a.members = a.starts[:1]
	for _, list := range lists {
		a.refine(list)
	}
	return a
}

// refine tells addresses in the list from others.
func (a *axis) refine(list []netip.Prefix) {
	type half struct {
		class int
		in    bool
	}
	known := map[half]int{}
	var members []netip.Addr
	next := 0 // of the list
	for i, start := range a.starts {
		for next < len(list) && iprange.Of(list[next]).To.Less(start) {
			next++
		}
		s := half{a.classes[i], next < len(list) && list[next].Contains(start)}
		class, ok := known[s]
		if !ok {
			class = len(members)
			known[s], members = class, append(members, start)
		}
		a.classes[i] = class
	}
	a.members = members
}

// listsOf returns the lists of the sources or the destinations, each in the order
// of the addresses.
func listsOf(ipv6, source bool, policies []Policy) (lists [][]netip.Prefix) {
	for _, p := range policies {
		for _, f := range p.Families {
			if f.IPv6 != ipv6 {
				continue
			}
			for _, q := range f.Questions {
				if q.Set != "" && (q.Asks == config.SourceAddress) == source {
					lists = append(lists, q.Prefixes())
				}
			}
		}
	}
	return lists
}

// class returns the class of an address.
func (a axis) class(addr netip.Addr) int {
	i, found := slices.BinarySearchFunc(a.starts, addr, netip.Addr.Compare)
	if !found {
		i--
	}
	return a.classes[i]
}

// prefixes returns the addresses of some classes as CIDRs.
func (a axis) prefixes(wanted func(class int) bool) []netip.Prefix {
	var out []netip.Prefix
	last := iprange.Of(netip.PrefixFrom(a.starts[0], 0)).To
	for i := 0; i < len(a.starts); i++ {
		if !wanted(a.classes[i]) {
			continue
		}
		r := iprange.Range{From: a.starts[i], To: last}
		for i++; i < len(a.starts) && wanted(a.classes[i]); i++ {
		}
		if i < len(a.starts) {
			r.To = a.starts[i].Prev()
		}
		out = append(out, r.Prefixes()...)
	}
	return out
}

// A Decider gives the verdicts of a policy about many connections: however long
// the lists are, a verdict takes two binary searches.
type Decider struct {
	policy Policy
	planes map[side]plane
}

// A side is connections that differ in their addresses alone.
type side struct{ ipv6, fromNode bool }

// sides returns those that policies can tell apart: connections from the node
// itself only if one of them asks more than what is in a list.
func sides(policies ...Policy) []side {
	out := []side{{}, {ipv6: true}}
	for _, p := range policies {
		for _, f := range p.Families {
			if slices.ContainsFunc(f.Questions, func(q Question) bool { return q.Set == "" }) {
				return append(out, side{fromNode: true}, side{ipv6: true, fromNode: true})
			}
		}
	}
	return out
}

// A plane has the verdict for each class of sources and of destinations.
type plane struct {
	src, dst axis
	verdicts []Verdict // of source class s and destination class d at s*len(dst.members)+d
}

// NewDecider prepares the verdicts of a policy.
func NewDecider(p Policy) *Decider {
	d := &Decider{policy: p, planes: map[side]plane{}}
	for _, s := range sides(p) {
		pl := plane{src: newAxis(s.ipv6, true, p), dst: newAxis(s.ipv6, false, p)}
		for _, src := range pl.src.members {
			for _, dst := range pl.dst.members {
				pl.verdicts = append(pl.verdicts, p.Decide(Connection{Src: src, Dst: dst, FromNode: s.fromNode}))
			}
		}
		d.planes[s] = pl
	}
	return d
}

// Decide is [Policy.Decide].
func (d *Decider) Decide(c Connection) Verdict {
	src, dst := c.Src.Unmap(), c.Dst.Unmap()
	if c.ToNode || src.Is4() != dst.Is4() {
		return d.policy.Decide(c)
	}
	pl, ok := d.planes[side{dst.Is6(), c.FromNode}]
	if !ok {
		pl = d.planes[side{ipv6: dst.Is6()}]
	}
	return pl.verdicts[pl.src.class(src)*len(pl.dst.members)+pl.dst.class(dst)]
}
