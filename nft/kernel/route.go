package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/foreign"
)

// A Route is the node's route to an address.
type Route struct {
	// Type is the type of the route, such as unix.RTN_LOCAL or
	// unix.RTN_BROADCAST, as in "fib daddr type"; unix.RTN_UNSPEC if there is no
	// route.
	Type int
	// Interface is the name of the route's interface, "" if unknown.
	Interface string

	index        uint32     // of the interface
	gateway, src netip.Addr // zero gateway: the destination is a neighbor; zero src: no address
}

// RouteTo returns the node's route to an address (rtnetlink(7), RTM_GETROUTE).
func RouteTo(a netip.Addr) (Route, error) { return routeTo{}.with(a, "").ask() }

func (r Route) out() foreign.Device { return foreign.Device{Name: r.Interface, Index: r.index} }

// A routeTo is a route request.
type routeTo struct {
	dst, src netip.Addr
	in       uint32 // input interface, 0 for none
	out      string
}

func (q routeTo) with(dst netip.Addr, out string) routeTo {
	q.dst, q.out = dst.WithZone(""), out
	return q
}

func (q routeTo) ask() (Route, error) {
	m, err := q.message()
	if err != nil {
		return Route{}, err
	}
	msgs, err := ask(m)
	switch {
	case isAny(err, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EXDEV):
		return Route{}, nil // no route, or a prohibiting one
	case err != nil:
		return Route{}, fmt.Errorf("route to %s: %w", q.dst, err)
	case len(msgs) == 0:
		return Route{}, fmt.Errorf("route to %s: no reply", q.dst)
	}
	r, err := parseRoute(msgs[0])
	if err != nil {
		return Route{}, fmt.Errorf("route to %s: %w", q.dst, err)
	}
	r.Interface = interfaceName(r.index)
	return r.Route, nil
}

// ask sends an rtnetlink request and returns the reply.
func ask(m netlink.Message) ([]netlink.Message, error) {
	nl, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Strict: true})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	return nl.Execute(m)
}

// A listedRoute is a route as the kernel reports it.
type listedRoute struct {
	Route
	dst netip.Prefix // zero: default
}

func parseRoute(m netlink.Message) (r listedRoute, err error) {
	const bitsAt, typeAt = 1, 7 // struct rtmsg: rtm_dst_len, rtm_type
	if len(m.Data) < unix.SizeofRtMsg {
		return r, fmt.Errorf("message of %d bytes", len(m.Data))
	}
	r.Type = int(m.Data[typeAt])
	attrs, err := netlink.UnmarshalAttributes(m.Data[unix.SizeofRtMsg:])
	for _, a := range attrs {
		addr, _ := netip.AddrFromSlice(a.Data)
		switch a.Type {
		case unix.RTA_OIF:
			r.index = nativeUint32(a.Data)
		case unix.RTA_GATEWAY:
			r.gateway = addr
		case unix.RTA_PREFSRC:
			r.src = addr
		case unix.RTA_DST:
			r.dst = netip.PrefixFrom(addr, int(m.Data[bitsAt]))
		}
	}
	return r, err
}

// routes lists the node's routes that a header, struct rtmsg, selects.
func routes(header []byte) ([]listedRoute, error) {
	msgs, err := ask(netlink.Message{Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request | netlink.Dump}, Data: header})
	out := make([]listedRoute, len(msgs))
	for i := 0; i < len(msgs) && err == nil; i++ {
		out[i], err = parseRoute(msgs[i])
	}
	return out, err
}

// interfaceName returns the name of an interface, "" if unknown.
func interfaceName(index uint32) string {
	i, err := net.InterfaceByIndex(int(index))
	if err != nil {
		return ""
	}
	return i.Name
}

func nativeUint32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

func (q routeTo) message() (netlink.Message, error) {
	head := make([]byte, unix.SizeofRtMsg)
	head[0], head[1] = unix.AF_INET, byte(q.dst.BitLen())
	if q.dst.Is6() {
		head[0] = unix.AF_INET6
	}
	attrs := []netlink.Attribute{{Type: unix.RTA_DST, Data: q.dst.AsSlice()}}
	if q.src.IsValid() {
		head[2] = byte(q.src.BitLen())
		attrs = append(attrs, netlink.Attribute{Type: unix.RTA_SRC, Data: q.src.AsSlice()})
	}
	if q.in != 0 {
		attrs = append(attrs, netlink.Attribute{Type: unix.RTA_IIF, Data: binary.NativeEndian.AppendUint32(nil, q.in)})
	}
	if q.out != "" {
		i, err := net.InterfaceByName(q.out)
		if err != nil {
			return netlink.Message{}, fmt.Errorf("interface %q: %w", q.out, err)
		}
		attrs = append(attrs, netlink.Attribute{Type: unix.RTA_OIF, Data: binary.NativeEndian.AppendUint32(nil, uint32(i.Index))})
	}
	b, err := netlink.MarshalAttributes(attrs)
	return netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request},
		Data:   append(head, b...),
	}, err
}

// masqueradeAddress returns the source address that masquerading assigns on a
// route: the interface's first address whose network contains the next hop, or
// else its first one of global scope (inet_select_addr), or the one that IPv6
// selects. It is the zero address if unknown.
func masqueradeAddress(r Route, dst netip.Addr) (netip.Addr, error) {
	all, err := addresses(dst.Is6())
	if err != nil {
		return netip.Addr{}, err
	}
	on := slices.DeleteFunc(slices.Clone(all), func(a address) bool { return a.index != r.index })
	hop := dst
	if r.gateway.IsValid() {
		hop = r.gateway
	}
	switch {
	case dst.Is6() && slices.ContainsFunc(on, func(a address) bool { return a.local == r.src }):
		return r.src, nil
	case dst.Is6() && len(on) == 1:
		return on[0].local, nil
	case dst.Is6():
		return netip.Addr{}, nil
	}
	for _, a := range on {
		if a.network.Contains(hop) {
			return a.local, nil
		}
	}
	for _, a := range append(on, all...) {
		return a.local, nil
	}
	return netip.Addr{}, nil
}

// An address is an address of the node with global scope, and not a secondary
// one.
type address struct {
	index   uint32
	local   netip.Addr
	network netip.Prefix
}

func addresses(ipv6 bool) ([]address, error) {
	head := make([]byte, unix.SizeofIfAddrmsg)
	head[0] = unix.AF_INET
	if ipv6 {
		head[0] = unix.AF_INET6
	}
	msgs, err := ask(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETADDR, Flags: netlink.Request | netlink.Dump}, Data: head,
	})
	if err != nil {
		return nil, fmt.Errorf("addresses of this node: %w", err)
	}
	var out []address
	for _, m := range msgs {
		const flagsAt, scopeAt, indexAt = 2, 3, 4 // struct ifaddrmsg
		d := m.Data
		if len(d) < unix.SizeofIfAddrmsg || d[scopeAt] != unix.RT_SCOPE_UNIVERSE {
			continue
		}
		if !ipv6 && d[flagsAt]&unix.IFA_F_SECONDARY != 0 || ipv6 && d[flagsAt]&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
			continue
		}
		attrs, err := netlink.UnmarshalAttributes(d[unix.SizeofIfAddrmsg:])
		if err != nil {
			return nil, fmt.Errorf("addresses of this node: %w", err)
		}
		a := address{index: nativeUint32(d[indexAt:])}
		for _, at := range attrs {
			addr, ok := netip.AddrFromSlice(at.Data)
			switch {
			case !ok:
			case at.Type == unix.IFA_ADDRESS:
				a.network = netip.PrefixFrom(addr, int(d[1])).Masked()
				if !a.local.IsValid() {
					a.local = addr
				}
			case at.Type == unix.IFA_LOCAL:
				a.local = addr
			}
		}
		out = append(out, a)
	}
	return out, nil
}

// LocalPrefixes returns the addresses of this node: those with a route of type
// LOCAL, as in "fib daddr type local".
func LocalPrefixes() (local []netip.Prefix, err error) {
	const tableAt, typeAt = 4, 7 // struct rtmsg, rtm_table and rtm_type
	header := make([]byte, unix.SizeofRtMsg)
	header[tableAt], header[typeAt] = unix.RT_TABLE_LOCAL, unix.RTN_LOCAL
	all, err := routes(header)
	if err != nil {
		return nil, fmt.Errorf("addresses of this node: %w", err)
	}
	for _, r := range all {
		if r.Type == unix.RTN_LOCAL && r.dst.IsValid() {
			local = append(local, r.dst)
		}
	}
	return local, nil
}
