package routes

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// Routes are the routes of a connection's first packet.
type Routes struct {
	// Back is the route to the source, the zero value if that is unknown. Packets from the
	// source are expected on its interface; with type unix.RTN_LOCAL the node sends them.
	Back Route
	// Own is the address from which the node itself connects to the destination, the zero address
	// if it has no route there.
	Own netip.Addr
	// Ways are the different routes that the packet may take. The first one is that of its mark.
	Ways []Route
}

// Out returns the names of the interfaces by which the packet may leave.
func (r Routes) Out() (names []string) {
	for _, way := range r.Ways {
		names = append(names, way.Interface.Name)
	}
	return names
}

// A Route is a way to an address.
type Route struct {
	// Type is the type of the route, such as unix.RTN_LOCAL or unix.RTN_BROADCAST, as in
	// "fib daddr type"; unix.RTN_UNSPEC if there is no route.
	Type int
	// Interface is that by which packets leave, the zero value if it is unknown.
	Interface Interface
	// Address is the source address after masquerading, the zero address if it is
	// unknown; AddressOf is the interface that has it.
	Address   netip.Addr
	AddressOf string
	// Depends names what chooses this way among several ones.
	Depends []string
}

// A Query is a packet to route.
type Query struct {
	Src, Dst netip.Addr // without a source, the node itself sends it
	// Out is the interface that it leaves by; empty: that of its route.
	Out string
	// Mark is that of the packet when it is routed; the bits of Open may differ.
	Mark, Open uint32
}

// Lookup finds the routes of a packet: that of its mark, those of other marks that it may have, and
// one of which nothing is known for each rule of policy routing that selects by what else the
// packet may have. If there is no interface of the name, the error wraps ENODEV, and the routes
// are as if there were.
func Lookup(q Query) (Routes, error) {
	return read("routes", func(r reader) Routes {
		l := lookup{reader: r, dst: q.Dst.WithZone(""), links: r.byIndex()}
		l.find(q)
		return l.Routes
	})
}

// These are offsets in struct rtmsg and struct fib_rule_hdr.
const dstBitsAt, srcBitsAt = 1, 2

// A lookup collects the routes to a destination.
type lookup struct {
	reader
	dst   netip.Addr
	out   uint32 // the interface, if it is given
	links map[uint32]Interface
	own   []node.Address
	Routes
}

// byKernel is what chooses among ways besides rules.
const byKernel = "the next hop that the kernel chooses"

func (l *lookup) find(of Query) {
	for _, i := range l.links {
		if i.Name == of.Out {
			l.out = i.Index
		}
	}
	l.own = l.Addresses(familyOf(l.dst))
	own := l.route(query{dst: l.dst, out: l.out}, 0)
	l.Own = own.Address(unix.RTA_PREFSRC)
	back := l.route(query{dst: of.Src}, 0)
	l.Back = Route{Type: routeType(back), Interface: l.links[hops(back)[0].index]}
	q := query{dst: l.dst, out: l.out, mark: of.Mark}
	if l.out == 0 {
		q.src = of.Src
		if l.Back.Type != unix.RTN_LOCAL {
			q.in = l.Back.Interface.Index
		}
	}
	l.follow(q)
	for _, rule := range l.rules(familyOf(l.dst)) {
		l.perhaps(rule, q, of)
	}
	for i, w := range l.Ways {
		if of.Out != "" && l.out == 0 {
			l.Ways[i].Interface, l.Ways[i].Address = Interface{Name: of.Out}, netip.Addr{}
			l.Err = cmp.Or(l.Err, fmt.Errorf("interface %q: %w", of.Out, unix.ENODEV))
		}
		for _, a := range l.own {
			name := l.links[a.Index].Name
			if a.Local == w.Address && (l.Ways[i].AddressOf == "" || name == w.Interface.Name) {
				l.Ways[i].AddressOf = name
			}
		}
	}
}

// perhaps adds the way of a rule that the packet may meet, by a mark or by what else it may have.
func (l *lookup) perhaps(rule node.Message, q query, of Query) {
	not := inverted(rule)
	mark, mask := rule.Number(unix.FRA_FWMARK), rule.Number(unix.FRA_FWMASK)
	on := fmt.Sprintf("ip rule %d", rule.Number(unix.FRA_PRIORITY))
	switch certain := (mark^of.Mark)&mask&^of.Open != 0; {
	case !not && (certain || !l.concerns(rule, of)):
	case selectsMore(rule, l.Back.Type == unix.RTN_LOCAL):
		l.add(Route{Type: unix.RTN_UNICAST, Depends: []string{on}}) // more is not known
	case mask&of.Open != 0:
		q.mark = of.Mark&^mask | mark&mask
		l.follow(q, on)
	}
}

// concerns reports whether a packet has the addresses and interfaces by which a rule selects.
func (l *lookup) concerns(rule node.Message, of Query) bool {
	within := func(attr uint16, bitsAt int, a netip.Addr) bool {
		network := rule.Address(attr)
		p, err := a.Prefix(int(rule.Head[bitsAt]))
		return !network.IsValid() || err == nil && p.Addr() == network
	}
	named := func(attr uint16, name string) bool {
		want, _, _ := strings.Cut(string(rule.Attr(attr)), "\x00")
		return want == "" || want == name
	}
	in := l.Back.Interface.Name
	if l.Back.Type == unix.RTN_LOCAL {
		in = "lo"
	}
	return within(unix.FRA_DST, dstBitsAt, l.dst) && within(unix.FRA_SRC, srcBitsAt, of.Src) &&
		named(unix.FRA_IIFNAME, in) && named(unix.FRA_OIFNAME, of.Out)
}

// follow adds the ways of a packet, and what they depend on.
func (l *lookup) follow(q query, on ...string) {
	m := l.route(q, 0)
	if routeType(m) == unix.RTN_UNSPEC && q.in == 0 { // the node does not send from a source that it does not have
		q.src = netip.Addr{}
		m = l.route(q, 0)
	}
	if routeType(m) == unix.RTN_UNSPEC {
		l.add(Route{Depends: on})
		return
	}
	entry := l.route(q, unix.RTM_F_FIB_MATCH)
	hops, all := hops(m), hops(entry)
	if len(all) > 1 && !q.hashesAddresses() {
		hops, on = all, append(on, byKernel)
	}
	for _, h := range hops {
		l.add(Route{Type: routeType(m), Interface: l.links[h.index], Address: l.masquerade(q, h, entry), Depends: on})
	}
	if all[0].index == 0 && entry.Attr(nexthopID) != nil { // net.ipv4.nexthop_compat_mode is 0
		l.add(Route{Type: unix.RTN_UNICAST, Depends: append(on, byKernel)})
	}
}

// add adds a way unless it is known.
func (l *lookup) add(r Route) {
	if !slices.ContainsFunc(l.Ways, func(have Route) bool {
		return have.Type == r.Type && have.Interface == r.Interface && have.Address == r.Address
	}) {
		l.Ways = append(l.Ways, r)
	}
}

// masquerade returns the source address after masquerading of packets that leave for a
// next hop of an entry of the routing table. For IPv4 the kernel takes the interface's
// first address whose network contains the next hop, or else its first one of global
// scope, or else any (inet_select_addr). For IPv6 it selects one for the destination
// (ipv6_dev_get_saddr), as for the node's own connections unless the entry has one.
func (l *lookup) masquerade(q query, h hop, entry node.Message) netip.Addr {
	never := uint32(unix.IFA_F_SECONDARY)
	if q.dst.Is6() {
		q.in, q.out, never = 0, h.index, unix.IFA_F_DEPRECATED // unless there is no other
		m := l.route(q, 0)
		if entry.Attr(unix.RTA_PREFSRC) == nil && entry.Attr(nexthopID) == nil && hops(m)[0].index == h.index {
			return m.Address(unix.RTA_PREFSRC)
		}
	}
	var on, all []netip.Addr
	for _, a := range l.own {
		if a.Scope != unix.RT_SCOPE_UNIVERSE || a.Flags&never != 0 {
			continue
		}
		all = append(all, a.Local)
		if a.Index == h.index {
			on = append(on, a.Local)
		}
		if a.Index == h.index && q.dst.Is4() && a.Network.Contains(cmp.Or(h.gateway, q.dst)) {
			return a.Local
		}
	}
	if q.dst.Is6() && len(on) != 1 {
		return netip.Addr{}
	}
	return append(append(on, all...), netip.Addr{})[0]
}

// nexthopID is the attribute of a route with nexthop objects, RTA_NH_ID. For these the
// kernel reports the source of the first.
const nexthopID = 30

// A query is what a request for a route carries.
type query struct {
	src, dst netip.Addr
	in, out  uint32 // interfaces, 0 for none
	mark     uint32
}

// hashesAddresses reports whether the kernel chooses the next hop of a packet by its
// addresses alone. It does by default, but for IPv6 it adds the flow label, and the node's
// own packets get their source with the route.
func (q query) hashesAddresses() bool {
	policy, err := os.ReadFile("/proc/sys/net/ipv4/fib_multipath_hash_policy")
	return err == nil && string(policy) == "0\n" && q.dst.Is4() && q.in != 0
}

// route requests a route, of type unix.RTN_UNSPEC if there is none. With RTM_F_FIB_MATCH it
// is the entry of the routing table.
func (r reader) route(q query, flags uint32) node.Message {
	const flagsAt = 8 // struct rtmsg
	none := node.Message{Head: make([]byte, unix.SizeofRtMsg)}
	if !q.dst.IsValid() {
		return none
	}
	head := make([]byte, unix.SizeofRtMsg)
	head[0], head[1] = familyOf(q.dst), byte(q.dst.BitLen())
	binary.NativeEndian.PutUint32(head[flagsAt:], flags)
	attrs := []netlink.Attribute{
		node.Numbered(unix.RTA_IIF, q.in), node.Numbered(unix.RTA_OIF, q.out), node.Numbered(unix.RTA_MARK, q.mark),
		{Type: unix.RTA_DST, Data: q.dst.AsSlice()},
	}
	if q.src.IsValid() {
		head[srcBitsAt] = byte(q.src.BitLen())
		attrs = append(attrs, netlink.Attribute{Type: unix.RTA_SRC, Data: q.src.AsSlice()})
	}
	replies := r.Request(unix.RTM_GETROUTE, 0, head, attrs...)
	if errors.Is(r.Err, unix.EMSGSIZE) && q.in != 0 { // of IPv6 multicast
		r.Err, q.in = nil, 0
		return r.route(q, flags)
	}
	for _, prohibited := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EXDEV} {
		if errors.Is(r.Err, prohibited) {
			r.Err = nil
		}
	}
	return append(replies, none)[0]
}

func routeType(m node.Message) int {
	const typeAt = 7 // struct rtmsg
	return int(m.Head[typeAt])
}

// A hop is a next hop of a route.
type hop struct {
	index   uint32     // of the interface
	gateway netip.Addr // the zero address if it is of the other family, or there is none
}

// hops returns the next hops of a route, at least one.
func hops(m node.Message) (all []hop) {
	const indexAt, align = 4, 4 // struct rtnexthop
	for b := m.Attr(unix.RTA_MULTIPATH); len(b) >= unix.SizeofRtNexthop; {
		size := int(binary.NativeEndian.Uint16(b))
		via := node.Message{Attrs: b[unix.SizeofRtNexthop:size]}
		all = append(all, hop{node.Number(b[indexAt:]), via.Address(unix.RTA_GATEWAY)})
		b = b[min(len(b), (size+align-1)/align*align):]
	}
	if len(all) == 0 {
		all = []hop{{m.Number(unix.RTA_OIF), m.Address(unix.RTA_GATEWAY)}}
	}
	return all
}

// LocalPrefixes returns the networks that are local to this node: those with a route of
// type LOCAL, as in "fib daddr type local".
func LocalPrefixes() ([]netip.Prefix, error) {
	return read("local routes", func(r reader) []netip.Prefix { return r.local(unix.RT_TABLE_LOCAL, unix.RTN_LOCAL) })
}

// Delivered returns the networks of which this node or one of its VRFs receives the packets: those that
// are local, and those of broadcast and anycast.
func Delivered() ([]netip.Prefix, error) {
	return read("local routes", func(r reader) []netip.Prefix {
		return r.local(unix.RT_TABLE_UNSPEC, unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_ANYCAST)
	})
}

// LocalInAnyTable returns the networks that are local to this node or to one of its VRFs, which
// have tables of local routes of their own.
func LocalInAnyTable() ([]netip.Prefix, error) {
	return read("local routes", func(r reader) []netip.Prefix { return r.local(unix.RT_TABLE_UNSPEC, unix.RTN_LOCAL) })
}

func (r reader) local(table byte, types ...int) (local []netip.Prefix) {
	const bitsAt, tableAt, typeAt = 1, 4, 7 // struct rtmsg
	head := make([]byte, unix.SizeofRtMsg)
	if head[tableAt] = table; len(types) == 1 {
		head[typeAt] = byte(types[0])
	}
	for _, m := range r.Request(unix.RTM_GETROUTE, netlink.Dump, head) {
		if dst := m.Address(unix.RTA_DST); slices.Contains(types, routeType(m)) && dst.IsValid() {
			local = append(local, netip.PrefixFrom(dst, int(m.Head[bitsAt])))
		}
	}
	return local
}

// A Network is a destination in the main table of routes, and the interface by which
// packets to it leave.
type Network struct {
	netip.Prefix
	Interface string
	Connected bool // the interface has an address in it
}

// Networks returns the destinations of the main table of routes.
func Networks() ([]Network, error) {
	return read("routes", func(r reader) []Network { return r.networks(r.byIndex(), unix.RT_TABLE_MAIN) })
}

// networks returns the destinations of a table of routes; 0: of all.
func (r reader) networks(links map[uint32]Interface, table byte) (all []Network) {
	const familyAt, bitsAt, tableAt, protocolAt = 0, 1, 4, 5 // struct rtmsg
	head := make([]byte, unix.SizeofRtMsg)
	head[tableAt] = table
	for _, m := range r.Request(unix.RTM_GETROUTE, netlink.Dump, head) {
		if routeType(m) != unix.RTN_UNICAST || table != 0 && m.Number(unix.RTA_TABLE) != uint32(table) {
			continue
		}
		dst := m.Address(unix.RTA_DST)
		if !dst.IsValid() { // the default route has none
			dst = netip.IPv4Unspecified()
			if m.Head[familyAt] == unix.AF_INET6 {
				dst = netip.IPv6Unspecified()
			}
		}
		for _, h := range hops(m) {
			connected := m.Head[protocolAt] == unix.RTPROT_KERNEL && m.Attr(unix.RTA_GATEWAY) == nil
			all = append(all, Network{netip.PrefixFrom(dst, int(m.Head[bitsAt])), links[h.index].Name, connected})
		}
	}
	return all
}

// familyOf returns the family of an address as a request begins with it.
func familyOf(a netip.Addr) byte {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
