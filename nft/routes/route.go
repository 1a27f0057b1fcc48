package routes

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/node"
)

// A Route is the way of a connection's first packet.
type Route struct {
	// Type is the type of the route to the destination, such as unix.RTN_LOCAL or
	// unix.RTN_BROADCAST, as in "fib daddr type"; unix.RTN_UNSPEC if there is none.
	Type int
	// Egress is the interface that the packet leaves by, the zero value if that is unknown.
	Egress Interface
	// Address is the source address after masquerading, the zero address if that is unknown.
	Address netip.Addr
	// SourceType is the type of the route to the source: with unix.RTN_LOCAL the node sends the packet. Otherwise
	// the packet is expected on the interface Ingress, the zero value if that is unknown.
	SourceType int
	Ingress    Interface
	// Own is the address from which the node itself connects to the destination, the zero address
	// if it has no route there.
	Own netip.Addr
}

// FromNode reports whether the node itself sends the packet.
func (r Route) FromNode() bool { return r.SourceType == unix.RTN_LOCAL }

// A Query is the first packet of a connection.
type Query struct {
	Src, Dst netip.Addr // without a source, the node itself sends it
	Protocol uint8      // 0 if unknown
	Port     uint16     // of the destination, 0 if unknown
	// Interface is the one that it leaves by; empty: that of its route.
	Interface string
}

// Lookup asks the kernel for the route of a packet without a mark, once, and for the one to its source. If
// there is no interface of the name, the error wraps ENODEV.
func Lookup(q Query) (Route, error) {
	return read("routes", func(r reader) Route { return r.lookup(q) })
}

func (r reader) lookup(q Query) Route {
	links := r.byIndex()
	dst := q.Dst.WithZone("")
	request := query{dst: dst, protocol: q.Protocol, port: q.Port}
	for _, link := range links {
		if link.Name == q.Interface {
			request.oif = link.Index
		}
	}
	if q.Interface != "" && request.oif == 0 {
		r.Err = cmp.Or(r.Err, fmt.Errorf("interface %q: %w", q.Interface, unix.ENODEV))
		return Route{}
	}
	own := r.route(request)
	reverse := r.route(query{dst: q.Src})
	route := Route{
		SourceType: routeType(reverse), Ingress: links[hopOf(reverse).index], Own: own.Address(unix.RTA_PREFSRC),
	}
	if request.oif == 0 {
		request.src = q.Src
		if !route.FromNode() {
			request.iif = route.Ingress.Index
		}
	}
	forward := r.route(request)
	if routeType(forward) == unix.RTN_UNSPEC && request.iif == 0 {
		// The node does not send from a source that it does not have.
		request.src = netip.Addr{}
		forward = r.route(request)
	}
	next := hopOf(forward)
	route.Type = routeType(forward)
	route.Egress = links[next.index]
	if route.Type != unix.RTN_UNSPEC {
		route.Address = r.masquerade(dst, next)
	}
	return route
}

// masquerade returns the source address after masquerading of packets that leave for a next hop: one of the interface.
// Where that has none, the kernel takes one of another interface, which is not followed here. For IPv4 it is the first
// one whose network contains the next hop, or else the first of global scope (inet_select_addr). For IPv6 the kernel
// selects one of several for the destination (ipv6_dev_get_saddr), as for the node's own connections, unless their
// route names one.
func (r reader) masquerade(dst netip.Addr, next hop) netip.Addr {
	never := byte(unix.IFA_F_SECONDARY)
	if dst.Is6() {
		never = unix.IFA_F_DEPRECATED // unless there is no other
	}
	var addresses []netip.Addr
	for _, a := range r.Addresses(familyOf(dst)) {
		if a.Index != next.index || a.Scope != unix.RT_SCOPE_UNIVERSE || a.Flags&never != 0 {
			continue
		}
		if dst.Is4() && a.Network.Contains(cmp.Or(next.gateway, dst)) {
			return a.Local
		}
		addresses = append(addresses, a.Local)
	}
	if dst.Is6() {
		own := r.route(query{dst: dst, oif: next.index})
		chosen := own.Address(unix.RTA_PREFSRC)
		if slices.Contains(addresses, chosen) {
			return chosen
		}
	}
	if len(addresses) == 0 {
		return netip.Addr{}
	}
	return addresses[0]
}

// A query is what a request for a route carries.
type query struct {
	src, dst netip.Addr
	iif, oif uint32 // interfaces, 0 for none
	protocol uint8
	port     uint16
}

// Attributes of a request since Linux 4.19 (linux/rtnetlink.h).
const ipProto, destinationPort = 27, 29 // RTA_IP_PROTO, RTA_DPORT

// route requests a route, of type unix.RTN_UNSPEC if there is none.
func (r reader) route(q query) node.Message {
	const srcBitsAt = 2 // struct rtmsg
	unreachable := node.Message{Head: make([]byte, unix.SizeofRtMsg)}
	if !q.dst.IsValid() {
		return unreachable
	}
	head := make([]byte, unix.SizeofRtMsg)
	head[0] = familyOf(q.dst)
	head[1] = byte(q.dst.BitLen())
	attrs := []netlink.Attribute{
		node.Numbered(unix.RTA_IIF, q.iif), node.Numbered(unix.RTA_OIF, q.oif),
		{Type: unix.RTA_DST, Data: q.dst.AsSlice()},
	}
	if q.src.IsValid() {
		head[srcBitsAt] = byte(q.src.BitLen())
		attrs = append(attrs, netlink.Attribute{Type: unix.RTA_SRC, Data: q.src.AsSlice()})
	}
	if q.protocol == unix.IPPROTO_TCP || q.protocol == unix.IPPROTO_UDP { // the kernel knows no ports of others
		attrs = append(attrs,
			netlink.Attribute{Type: ipProto, Data: []byte{q.protocol}},
			netlink.Attribute{Type: destinationPort, Data: binary.BigEndian.AppendUint16(nil, q.port)})
	}
	replies := r.Request(unix.RTM_GETROUTE, 0, head, attrs...)
	if errors.Is(r.Err, unix.EMSGSIZE) && q.iif != 0 { // of IPv6 multicast
		r.Err = nil
		q.iif = 0
		return r.route(q)
	}
	for _, prohibited := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EXDEV} {
		if errors.Is(r.Err, prohibited) {
			r.Err = nil
		}
	}
	return append(replies, unreachable)[0]
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

// hopOf returns the next hop of a route that the kernel looked up for a packet.
func hopOf(m node.Message) hop { return hops(m)[0] }

// hops returns the next hops of a route, at least one.
func hops(m node.Message) (list []hop) {
	const indexAt, align = 4, 4 // struct rtnexthop
	for b := m.Attr(unix.RTA_MULTIPATH); len(b) >= unix.SizeofRtNexthop; {
		size := int(binary.NativeEndian.Uint16(b))
		via := node.Message{Attrs: b[unix.SizeofRtNexthop:size]}
		list = append(list, hop{node.Number(b[indexAt:]), via.Address(unix.RTA_GATEWAY)})
		b = b[min(len(b), (size+align-1)/align*align):]
	}
	if len(list) == 0 {
		list = []hop{{m.Number(unix.RTA_OIF), m.Address(unix.RTA_GATEWAY)}}
	}
	return list
}

// A Network is a destination in a table of routes. It is in the list once for each next hop.
type Network struct {
	netip.Prefix
	Type      int    // as that of a [Route]
	Main      bool   // it is in the main table
	Interface string // by which packets to it leave
	Connected bool   // the interface has an address in it
}

// Networks returns the destinations of all tables of routes.
func Networks() ([]Network, error) {
	return read("routes", func(r reader) []Network { return r.networks(r.byIndex()) })
}

func (r reader) networks(links map[uint32]Interface) (networks []Network) {
	const familyAt, bitsAt, protocolAt = 0, 1, 5 // struct rtmsg
	for _, m := range r.Request(unix.RTM_GETROUTE, netlink.Dump, make([]byte, unix.SizeofRtMsg)) {
		dst := m.Address(unix.RTA_DST)
		if !dst.IsValid() { // the default route has none
			dst = netip.IPv4Unspecified()
			if m.Head[familyAt] == unix.AF_INET6 {
				dst = netip.IPv6Unspecified()
			}
		}
		for _, h := range hops(m) {
			networks = append(networks, Network{
				Prefix: netip.PrefixFrom(dst, int(m.Head[bitsAt])), Type: routeType(m),
				Main: m.Number(unix.RTA_TABLE) == unix.RT_TABLE_MAIN, Interface: links[h.index].Name,
				Connected: m.Head[protocolAt] == unix.RTPROT_KERNEL && m.Attr(unix.RTA_GATEWAY) == nil,
			})
		}
	}
	return networks
}

// familyOf returns the family of an address as a request begins with it.
func familyOf(a netip.Addr) byte {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
