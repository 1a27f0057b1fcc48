package nft

import (
	"maps"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/iprange"
)

// An axis divides the addresses of a family into cells at the addresses at which
// the answer to a question can change. Cells in which every question has the same
// answer form a class.
type axis struct {
	starts  []netip.Addr // of the cells, in order
	classes []int        // of the cells
	members []netip.Addr // one address of each class
}

// newAxis divides the sources or the destinations by the lists of all policies.
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
	// A class is defined by the set of lists that contain an address, refined
	// list by list.
	a.classes = make([]int, len(a.starts))
	a.members = a.starts[:1]
	for _, list := range lists {
		a.refine(list)
	}
	return a
}

// refine separates addresses in the list from others.
func (a *axis) refine(list []netip.Prefix) {
	type half struct {
		class int
		in    bool
	}
	known := map[half]int{}
	var members []netip.Addr
	next := 0 // index in the list
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

// listsOf returns the lists of sources or destinations, each sorted by address.
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

// A Decider returns the verdicts of a policy for many connections: regardless of
// the length of the lists, a verdict takes two binary searches.
type Decider struct {
	policy Policy
	board  board
	planes map[side]plane
}

// A side is a set of connections that differ only in their addresses.
type side struct {
	ipv6, fromNode bool
	in, out        int // classes of the interfaces
}

// A board has the sides that the policies can distinguish.
type board struct {
	apart   bool // whether connections from the node itself are distinguished
	in, out nameAxis
}

func newBoard(policies ...Policy) board {
	b := board{in: newNameAxis(config.ReceivedOn, policies), out: newNameAxis(config.LeavingBy, policies)}
	for _, p := range policies {
		for _, f := range p.Families {
			b.apart = b.apart || slices.ContainsFunc(f.Questions, func(q Question) bool {
				return q.Asks == config.SentByNode || q.Asks == config.ReceivedOn
			})
		}
	}
	return b
}

func (b board) side(c Connection) side {
	s := side{ipv6: c.Dst.Unmap().Is6(), fromNode: b.apart && c.FromNode, out: b.out.class(c.Out)}
	if !s.fromNode {
		s.in = b.in.class(c.In)
	}
	return s
}

func (b board) sides(ipv6 bool) (all []side) {
	for out := range b.out.members {
		for in := range b.in.members {
			all = append(all, side{ipv6: ipv6, in: in, out: out})
		}
	}
	if b.apart {
		for out := range b.out.members {
			all = append(all, side{ipv6: ipv6, fromNode: true, out: out})
		}
	}
	return all
}

// connection returns a connection of a side.
func (b board) connection(s side, src, dst netip.Addr) Connection {
	return Connection{Src: src, Dst: dst, FromNode: s.fromNode, In: b.in.members[s.in], Out: b.out.members[s.out]}
}

// A nameAxis divides the names of interfaces into classes that no list
// distinguishes. Class 0 is in no list.
type nameAxis struct {
	lists   [][]config.Interface
	classes map[string]int // by the lists that contain a name
	members []string       // one name of each class
	names   [][]string     // the names and prefixes in the lists, by class
}

func newNameAxis(asks config.Subject, policies []Policy) nameAxis {
	a := nameAxis{classes: map[string]int{}}
	candidates := map[string]string{"": ""} // by list entry
	for _, p := range policies {
		for _, f := range p.Families {
			for _, q := range f.Questions {
				if q.Asks != asks {
					continue
				}
				a.lists = append(a.lists, q.Interfaces)
				for _, i := range q.Interfaces {
					candidates[i.Name] = i.Name
					if prefix, several := i.Prefix(); several {
						candidates[i.Name] = prefix + "\x00" // a name that no other entry matches
					}
				}
			}
		}
	}
	for _, written := range slices.Sorted(maps.Keys(candidates)) {
		name := candidates[written]
		in := a.listsWith(name)
		class, known := a.classes[in]
		if !known {
			class = len(a.members)
			a.classes[in] = class
			a.members, a.names = append(a.members, name), append(a.names, nil)
		}
		a.names[class] = append(a.names[class], written)
	}
	return a
}

// listsWith returns one character per list: whether the name is in it.
func (a nameAxis) listsWith(name string) string {
	in := make([]byte, len(a.lists))
	for i, list := range a.lists {
		in[i] = 'n'
		if name != "" && slices.ContainsFunc(list, func(i config.Interface) bool { return i.Matches(name) }) {
			in[i] = 'y'
		}
	}
	return string(in)
}

// class returns the class of a name.
func (a nameAxis) class(name string) int { return a.classes[a.listsWith(name)] }

// A plane has the verdicts for all classes of sources and destinations.
type plane struct {
	src, dst axis
	verdicts []Verdict // for source class s and destination class d at s*len(dst.members)+d
}

// NewDecider computes the verdicts of a policy.
func NewDecider(p Policy) *Decider {
	d := &Decider{policy: p, board: newBoard(p), planes: map[side]plane{}}
	for _, ipv6 := range []bool{false, true} {
		srcs, dsts := newAxis(ipv6, true, p), newAxis(ipv6, false, p)
		for _, s := range d.board.sides(ipv6) {
			pl := plane{src: srcs, dst: dsts}
			for _, src := range pl.src.members {
				for _, dst := range pl.dst.members {
					pl.verdicts = append(pl.verdicts, p.Decide(d.board.connection(s, src, dst)))
				}
			}
			d.planes[s] = pl
		}
	}
	return d
}

// Decide is like [Policy.Decide].
func (d *Decider) Decide(c Connection) Verdict {
	src, dst := c.Src.Unmap(), c.Dst.Unmap()
	if c.ToNode || src.Is4() != dst.Is4() {
		return d.policy.Decide(c)
	}
	pl := d.planes[d.board.side(c)]
	return pl.verdicts[pl.src.class(src)*len(pl.dst.members)+pl.dst.class(dst)]
}

// Masquerades reports whether any connection of a family is masqueraded.
func (d *Decider) Masquerades(ipv6 bool) bool {
	for s, pl := range d.planes {
		if s.ipv6 == ipv6 && slices.Contains(pl.verdicts, Masqueraded) {
			return true
		}
	}
	return false
}

// Certain is like Decide for connections whose interfaces are unknown. It returns
// false if the verdict depends on them.
func (d *Decider) Certain(c Connection) (Verdict, bool) {
	v := d.Decide(c)
	for _, in := range d.board.in.members {
		for _, out := range d.board.out.members {
			if c.In, c.Out = in, out; d.Decide(c) != v {
				return v, false
			}
		}
	}
	return v, true
}
