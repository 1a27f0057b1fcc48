package netns

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// End is the device at one end of a cable.
type End struct {
	NS  *NS
	Dev string
	MAC net.HardwareAddr
}

// Route is a route to Dst through Dev, via the gateway Via if that is valid.
type Route struct {
	Dst netip.Prefix
	Via netip.Addr
	Dev string
}

// LinkUp brings a device up.
func (n *NS) LinkUp(dev string) error {
	return n.onLink(dev, func(index uint32) error {
		return n.change(unix.RTM_NEWLINK, 0, ifinfomsg(index, unix.IFF_UP), nil)
	})
}

// AddAddr gives a device an address, usable at once (no duplicate address
// detection). It is not an error if the device already has it.
func (n *NS) AddAddr(dev string, prefix netip.Prefix) error {
	err := n.onLink(dev, func(index uint32) error {
		ip := prefix.Addr().WithZone("").AsSlice()
		msg := []byte{byte(Family(prefix.Addr())), byte(prefix.Bits()), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
		msg = native32(msg, index)
		return n.change(unix.RTM_NEWADDR, netlink.Create|netlink.Replace, msg, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.IFA_LOCAL, ip)
			ae.Bytes(unix.IFA_ADDRESS, ip)
		})
	})
	if err != nil || prefix.Addr().Is4() || prefix.Addr().IsLinkLocalUnicast() {
		return err
	}
	return n.awaitLocal(prefix.Addr())
}

// awaitLocal waits until the namespace accepts packets to an IPv6 address: the
// kernel adds the route some time after the address.
func (n *NS) awaitLocal(addr netip.Addr) error {
	const typeAt = 7 // struct rtmsg, rtm_type
	dst, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.RTA_DST, Data: addr.AsSlice()}})
	if err != nil {
		return err
	}
	question := append([]byte{unix.AF_INET6, 128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, dst...)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		// Without a route to it the reply is an error.
		messages, err := n.request(unix.RTM_GETROUTE, 0, question)
		if err == nil && len(messages) > 0 && messages[0].Data[typeAt] == unix.RTN_LOCAL {
			return nil
		}
	}
	return fmt.Errorf("address %s of %s: %w", addr, n, os.ErrDeadlineExceeded)
}

// AddRoute adds a route. It is not an error if it already exists.
func (n *NS) AddRoute(r Route) error {
	return n.onLink(r.Dev, func(index uint32) error {
		scope := byte(unix.RT_SCOPE_UNIVERSE)
		if !r.Via.IsValid() && r.Dst.Addr().Is4() {
			scope = unix.RT_SCOPE_LINK
		}
		msg := []byte{
			byte(Family(r.Dst.Addr())), byte(r.Dst.Bits()), 0, 0,
			unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, scope, unix.RTN_UNICAST,
		}
		msg = native32(msg, 0)
		return n.change(unix.RTM_NEWROUTE, netlink.Create|netlink.Replace, msg, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.RTA_DST, r.Dst.Addr().AsSlice())
			ae.Uint32(unix.RTA_OIF, index)
			if r.Via.IsValid() {
				ae.Bytes(unix.RTA_GATEWAY, r.Via.AsSlice())
			}
		})
	})
}

// AddNeighbour adds a permanent neighbor entry for an address on a device's link.
func (n *NS) AddNeighbour(dev string, addr netip.Addr, mac net.HardwareAddr) error {
	const ndaDst, ndaLLAddr = 1, 2 // NDA_DST, NDA_LLADDR, linux/neighbour.h
	return n.onLink(dev, func(index uint32) error {
		msg := native32([]byte{byte(Family(addr)), 0, 0, 0}, index)
		msg = binary.NativeEndian.AppendUint16(msg, unix.NUD_PERMANENT)
		msg = append(msg, 0, 0)
		return n.change(unix.RTM_NEWNEIGH, netlink.Create|netlink.Replace, msg, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(ndaDst, addr.AsSlice())
			ae.Bytes(ndaLLAddr, mac)
		})
	})
}

// AddVeth creates a veth pair. Its devices are down.
func AddVeth(a, b End) error {
	const vethInfoPeer = 1 // VETH_INFO_PEER, linux/veth.h
	err := a.NS.change(unix.RTM_NEWLINK, netlink.Create|netlink.Excl, ifinfomsg(0, 0), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, a.Dev)
		ae.Bytes(unix.IFLA_ADDRESS, a.MAC)
		ae.Nested(unix.IFLA_LINKINFO, func(info *netlink.AttributeEncoder) error {
			info.String(unix.IFLA_INFO_KIND, "veth")
			info.Nested(unix.IFLA_INFO_DATA, func(data *netlink.AttributeEncoder) error {
				peer := netlink.NewAttributeEncoder()
				peer.String(unix.IFLA_IFNAME, b.Dev)
				peer.Bytes(unix.IFLA_ADDRESS, b.MAC)
				peer.Uint32(unix.IFLA_NET_NS_FD, uint32(b.NS.Fd()))
				attrs, err := peer.Encode()
				data.Bytes(vethInfoPeer, append(ifinfomsg(0, 0), attrs...))
				return err
			})
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("veth from %s of %s to %s of %s: %w", a.Dev, a.NS, b.Dev, b.NS, err)
	}
	return nil
}

// AwaitCarrier waits until the device is operational. The kernel activates a
// device's queue some time after the other end of the cable came up, and drops
// packets until then.
func (n *NS) AwaitCarrier(dev string) error {
	return n.onLink(dev, func(index uint32) error {
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			messages, err := n.request(unix.RTM_GETLINK, 0, ifinfomsg(index, 0))
			if err != nil {
				return err
			}
			for _, m := range messages {
				if operational(m) {
					return nil
				}
			}
		}
		return os.ErrDeadlineExceeded
	})
}

func operational(m netlink.Message) bool {
	const up = 6 // IF_OPER_UP, RFC 2863
	if len(m.Data) < unix.SizeofIfInfomsg {
		return false
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[unix.SizeofIfInfomsg:])
	if err != nil {
		return false
	}
	for ad.Next() {
		if ad.Type() == unix.IFLA_OPERSTATE {
			return ad.Uint8() == up
		}
	}
	return false
}

// onLink calls fn with the index of the device and adds the names to its error.
func (n *NS) onLink(dev string, fn func(index uint32) error) error {
	var index uint32
	err := n.Do(func() error {
		i, err := net.InterfaceByName(dev)
		if err == nil {
			index = uint32(i.Index)
		}
		return err
	})
	if err == nil {
		err = fn(index)
	}
	if err != nil {
		return fmt.Errorf("%s: device %s: %w", n.name, dev, err)
	}
	return nil
}

// change sends one rtnetlink message that changes something.
func (n *NS) change(kind uint16, flags netlink.HeaderFlags, body []byte, encode func(*netlink.AttributeEncoder)) error {
	if encode != nil {
		ae := netlink.NewAttributeEncoder()
		encode(ae)
		attrs, err := ae.Encode()
		if err != nil {
			return err
		}
		body = append(body, attrs...)
	}
	_, err := n.request(kind, netlink.Acknowledge|flags, body)
	return err
}

// request sends one rtnetlink message and waits for its reply.
func (n *NS) request(kind uint16, flags netlink.HeaderFlags, body []byte) ([]netlink.Message, error) {
	conn, err := n.routeConn()
	if err != nil {
		return nil, err
	}
	return conn.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request | flags},
		Data:   body,
	})
}

// routeConn returns the namespace's only rtnetlink connection. Separate
// connections would wait for an RCU grace period at every close.
func (n *NS) routeConn() (*netlink.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rtnl != nil {
		return n.rtnl, nil
	}
	err := n.Do(func() (err error) {
		n.rtnl, err = netlink.Dial(unix.NETLINK_ROUTE, nil)
		return err
	})
	return n.rtnl, err
}

// ifinfomsg encodes struct ifinfomsg, linux/rtnetlink.h.
func ifinfomsg(index, flags uint32) []byte {
	msg := []byte{unix.AF_UNSPEC, 0, 0, 0}
	msg = native32(msg, index)
	msg = native32(msg, flags)
	return native32(msg, flags) // the flags to change
}

func native32(b []byte, v uint32) []byte { return binary.NativeEndian.AppendUint32(b, v) }

// Family returns AF_INET or AF_INET6.
func Family(addr netip.Addr) int {
	if addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
