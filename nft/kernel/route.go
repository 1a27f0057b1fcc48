package kernel

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// RouteType says of what type the node's route to an address is, such as
// unix.RTN_LOCAL or unix.RTN_BROADCAST: what "fib daddr type" finds (rtnetlink(7),
// RTM_GETROUTE). It is unix.RTN_UNSPEC where there is no route.
func RouteType(a netip.Addr) (int, error) {
	nl, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return unix.RTN_UNSPEC, fmt.Errorf("netlink socket: %w", err)
	}
	defer func() { _ = nl.Close() }()
	msgs, err := nl.Execute(routeQuestion(a.WithZone("")))
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return unix.RTN_UNSPEC, nil // no route, or one that refuses
	case err != nil:
		return unix.RTN_UNSPEC, fmt.Errorf("route to %s: %w", a, err)
	case len(msgs) == 0 || len(msgs[0].Data) < unix.SizeofRtMsg:
		return unix.RTN_UNSPEC, fmt.Errorf("route to %s: no answer", a)
	}
	const typeAt = 7 // struct rtmsg, rtm_type
	return int(msgs[0].Data[typeAt]), nil
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
