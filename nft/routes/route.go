package routes

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// Routes are the routes of a connection's first packet.
type Routes struct {
	// Back is the route to the source, the zero value if that is unknown. Packets from the
	// source are expected on its interface; with type unix.RTN_LOCAL the node sends them.
	Back Route
	// Ways are the different routes that the packet may take. The first one is that of UDP
	// without a mark.
	Ways []Route
}

// A Route is a way to an address.
type Route struct {
	// Type is the type of the route, such as unix.RTN_LOCAL or unix.RTN_BROADCAST, as in
	// "fib daddr type"; unix.RTN_UNSPEC if there is no route.
	Type int
	// Interface is that by which packets leave, the zero value if it is unknown.
	Interface Interface
	// Address is the source address after masquerading, the zero address if it is
	// unknown.
	Address netip.Addr
	// Depends names what chooses this way among several ones.
	Depends []string
}

// Lookup finds the routes from a source, or from any pod if that is the zero address, to
// dst. If out is not empty, the packet leaves by that interface; if there is none of that
// name, the error wraps ENODEV, and the routes are as if there were. The kernel is asked
// about each kind of packets that rules of policy routing distinguish.
func Lookup(src, dst netip.Addr, out string) (Routes, error) {
	return read("routes", func(r reader) Routes {
		l := lookup{reader: r, dst: dst.WithZone(""), links: r.byIndex(), kinds: []traffic{{}}}
		l.find(src, out)
		return l.Routes
	})
}

// srcBitsAt is an offset in struct rtmsg and struct fib_rule_hdr.
const srcBitsAt = 2

// A lookup collects the routes to a destination.
type lookup struct {
	reader
	dst   netip.Addr
	out   uint32 // the interface, if it is given
	links map[uint32]Interface
	own   []node.Address
	kinds []traffic
	Routes
}

// What chooses among ways besides rules.
const (
	onSource = "the source: set --from"
	byKernel = "the next hop that the kernel chooses"
)

func (l *lookup) find(src netip.Addr, out string) {
	for _, i := range l.links {
		if i.Name == out {
			l.out = i.Index
		}
	}
	l.own = l.Addresses(familyOf(l.dst))
	rules := l.rules(familyOf(l.dst))
	for _, rule := range rules {
		l.distinguish(kindsOf(rule))
	}
	l.explore(src)
	for _, rule := range rules {
		from := rule.Address(unix.FRA_SRC)
		switch network := int(rule.Head[srcBitsAt]) < from.BitLen(); {
		case src.IsValid(), out != "":
		case network, rule.Attr(unix.FRA_IIFNAME) != nil:
			l.add(Route{Type: unix.RTN_UNICAST, Depends: []string{onSource}}) // more is not known
		case from.IsValid():
			l.explore(from, onSource)
		}
	}
	for i := range l.Ways {
		if out != "" && l.out == 0 {
			l.Ways[i].Interface, l.Ways[i].Address = Interface{Name: out}, netip.Addr{}
			l.Err = cmp.Or(l.Err, fmt.Errorf("interface %q: %w", out, unix.ENODEV))
		}
	}
}

func (l *lookup) distinguish(kinds []traffic) {
	const most = 500
	for _, k := range kinds {
		k.open = k.open || len(l.kinds) > most
		for _, have := range l.kinds[:min(len(l.kinds), most)] {
			l.kinds = append(l.kinds, traffic{slices.Concat(have.attrs, k.attrs), k.open, slices.Concat(have.rules, k.rules)})
		}
	}
}

// explore adds the ways of packets from a source. Unless it is the given one, they depend
// on something, and no pod has an address of the node.
func (l *lookup) explore(src netip.Addr, on ...string) {
	m := l.route(query{dst: src}, 0)
	back := Route{Type: routeType(m), Interface: l.links[hops(m)[0].index]}
	if len(on) == 0 {
		l.Back = back
	} else if back.Type == unix.RTN_LOCAL {
		return
	}
	q := query{dst: l.dst, out: l.out}
	if l.out == 0 {
		q.src = src
		if back.Type != unix.RTN_LOCAL {
			q.in = back.Interface.Index
		}
	}
	for _, q.traffic = range l.kinds {
		l.follow(q, slices.Concat(on, q.rules))
	}
}

// follow adds the ways of one kind of packets, and what they depend on.
func (l *lookup) follow(q query, on []string) {
	if q.open {
		l.add(Route{Type: unix.RTN_UNICAST, Depends: on}) // more is not known
		return
	}
	m := l.route(q, 0)
	if routeType(m) == unix.RTN_UNSPEC { // perhaps the kernel rejects the source on that interface
		q.src, q.in = netip.Addr{}, 0
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
		l.add(Route{routeType(m), l.links[h.index], l.masquerade(q, h, entry), on})
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
	traffic
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
	attrs := append(slices.Clip(q.attrs), node.Numbered(unix.RTA_IIF, q.in), node.Numbered(unix.RTA_OIF, q.out),
		netlink.Attribute{Type: unix.RTA_DST, Data: q.dst.AsSlice()})
	if q.src.IsValid() {
		head[srcBitsAt] = byte(q.src.BitLen())
		attrs = append(attrs, netlink.Attribute{Type: unix.RTA_SRC, Data: q.src.AsSlice()})
	}
	replies := r.Request(unix.RTM_GETROUTE, 0, head, attrs...)
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
func LocalPrefixes() ([]netip.Prefix, error) { return read("local routes", reader.local) }

func (r reader) local() (local []netip.Prefix) {
	const bitsAt, tableAt, typeAt = 1, 4, 7 // struct rtmsg
	head := make([]byte, unix.SizeofRtMsg)
	head[tableAt], head[typeAt] = unix.RT_TABLE_LOCAL, unix.RTN_LOCAL
	for _, m := range r.Request(unix.RTM_GETROUTE, netlink.Dump, head) {
		if dst := m.Address(unix.RTA_DST); routeType(m) == unix.RTN_LOCAL && dst.IsValid() {
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
