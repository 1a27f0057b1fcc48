package nft

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/iprange"
)

// An axis divides the addresses of a family into cells at the addresses at which
// the answer to a question can change. Cells in which every question has the same
// answer form a class. The cells are not stored, because there can be hundreds of
// thousands.
type axis struct {
	first   netip.Addr // of the family
	lists   [][]netip.Prefix
	classes map[string]int // by the lists that contain an address
	members []netip.Addr   // one address of each class
}

// newAxis divides the sources or the destinations by the lists of all policies.
func newAxis(ipv6, source bool, policies ...Policy) axis {
	a := axis{first: netip.IPv4Unspecified(), lists: listsOf(ipv6, source, policies), classes: map[string]int{}}
	if ipv6 {
		a.first = netip.IPv6Unspecified()
	}
	for start, in := range a.cells() {
		if _, known := a.classes[string(in)]; !known {
			a.classes[string(in)] = len(a.members)
			a.members = append(a.members, start)
		}
	}
	return a
}

// cells returns the first address of each cell, in order, with one character per
// list: whether the cell is in it.
func (a axis) cells() iter.Seq2[netip.Addr, []byte] {
	return func(yield func(start netip.Addr, in []byte) bool) {
		rest, in := slices.Clone(a.lists), make([]byte, len(a.lists))
		for start := a.first; start.IsValid(); {
			var next netip.Addr
			for i, list := range rest {
				in[i] = 'n'
				if len(list) == 0 {
					continue
				}
				boundary := list[0].Addr()
				if !start.Less(boundary) {
					in[i], boundary = 'y', iprange.Of(list[0]).To.Next()
				}
				if boundary.IsValid() && (!next.IsValid() || boundary.Less(next)) {
					next = boundary
				}
			}
			if !yield(start, in) {
				return
			}
			for i, list := range rest {
				if next.IsValid() && in[i] == 'y' && !list[0].Contains(next) {
					rest[i] = list[1:]
				}
			}
			start = next
		}
	}
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
	in := make([]byte, len(a.lists))
	for i, list := range a.lists {
		in[i] = 'n'
		after, found := slices.BinarySearchFunc(list, addr, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
		if found || after > 0 && list[after-1].Contains(addr) {
			in[i] = 'y'
		}
	}
	return a.classes[string(in)]
}

// prefixes returns the addresses of some classes as CIDRs.
func (a axis) prefixes(wanted func(class int) bool) []netip.Prefix {
	var out []netip.Prefix
	var from netip.Addr // of the adjacent cells so far
	for start, in := range a.cells() {
		switch is := wanted(a.classes[string(in)]); {
		case is && !from.IsValid():
			from = start
		case !is && from.IsValid():
			out = append(out, iprange.Range{From: from, To: start.Prev()}.Prefixes()...)
			from = netip.Addr{}
		}
	}
	if from.IsValid() {
		out = append(out, iprange.Range{From: from, To: iprange.Of(netip.PrefixFrom(a.first, 0)).To}.Prefixes()...)
	}
	return out
}

// A Decider returns the verdicts of a policy for many connections: a verdict takes
// a binary search per list, regardless of its length.
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
