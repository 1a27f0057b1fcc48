package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Route is the node's route to an address.
type Route struct {
	// Type is one such as unix.RTN_LOCAL or unix.RTN_BROADCAST: what "fib daddr type"
	// finds; unix.RTN_UNSPEC if there is no route.
	Type int
	// Interface is the name of the one by which the route leads, "" if it is not known.
	Interface string
}

// RouteTo returns the node's route to an address (rtnetlink(7), RTM_GETROUTE).
func RouteTo(a netip.Addr) (Route, error) {
	nl, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return Route{}, fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	msgs, err := nl.Execute(routeQuestion(a.WithZone("")))
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return Route{}, nil // no route, or one that refuses
	case err != nil:
		return Route{}, fmt.Errorf("route to %s: %w", a, err)
	case len(msgs) == 0 || len(msgs[0].Data) < unix.SizeofRtMsg:
		return Route{}, fmt.Errorf("route to %s: no answer", a)
	}
	const typeAt = 7 // struct rtmsg, rtm_type
	r := Route{Type: int(msgs[0].Data[typeAt])}
	attrs, err := netlink.UnmarshalAttributes(msgs[0].Data[unix.SizeofRtMsg:])
	if err != nil {
		return Route{}, fmt.Errorf("route to %s: %w", a, err)
	}
	for _, attr := range attrs {
		if attr.Type != unix.RTA_OIF || len(attr.Data) != 4 {
			continue
		}
		if out, err := net.InterfaceByIndex(int(binary.NativeEndian.Uint32(attr.Data))); err == nil {
			r.Interface = out.Name
		}
	}
	return r, nil
}

func routeQuestion(a netip.Addr) netlink.Message {
	head := make([]byte, unix.SizeofRtMsg)
	head[0], head[1] = unix.AF_INET, byte(a.BitLen())
	if a.Is6() {
		head[0] = unix.AF_INET6
	}
	// One attribute of a known kind cannot fail.
	dst, _ := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.RTA_DST, Data: a.AsSlice()}})
	return netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request},
		Data:   append(head, dst...),
	}
}

// LocalPrefixes returns the addresses of this node: those for which the kernel has
// a route of type LOCAL, as "fib daddr type local" finds them.
func LocalPrefixes() ([]netip.Prefix, error) {
	nl, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Strict: true})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	const tableAt, typeAt = 4, 7 // struct rtmsg, rtm_table and rtm_type
	head := make([]byte, unix.SizeofRtMsg)
	head[tableAt], head[typeAt] = unix.RT_TABLE_LOCAL, unix.RTN_LOCAL
	msgs, err := nl.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request | netlink.Dump},
		Data:   head,
	})
	if err != nil {
		return nil, fmt.Errorf("addresses of this node: %w", err)
	}
	var local []netip.Prefix
	for _, m := range msgs {
		if len(m.Data) < unix.SizeofRtMsg || m.Data[typeAt] != unix.RTN_LOCAL {
			continue
		}
		attrs, err := netlink.UnmarshalAttributes(m.Data[unix.SizeofRtMsg:])
		if err != nil {
			return nil, fmt.Errorf("addresses of this node: %w", err)
		}
		for _, a := range attrs {
			if addr, ok := netip.AddrFromSlice(a.Data); ok && a.Type == unix.RTA_DST {
				local = append(local, netip.PrefixFrom(addr, int(m.Data[1])))
			}
		}
	}
	return local, nil
}
