package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
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

// Netlink returns what changes the namespace's devices, routes, connections and sets of addresses.
// There is one for each namespace: closing a socket waits for an RCU grace period.
func (n *NS) Netlink() (*netlink.Handle, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.handle != nil {
		return n.handle, nil
	}
	var err error
	n.handle, err = In(n, func() (*netlink.Handle, error) {
		return netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	})
	return n.handle, err
}

// LinkUp brings a device up.
func (n *NS) LinkUp(dev string) error {
	return n.onLink(dev, func(h *netlink.Handle, link netlink.Link) error { return h.LinkSetUp(link) })
}

// AddAddr gives a device an address, usable at once (no duplicate address
// detection). It is not an error if the device already has it.
func (n *NS) AddAddr(dev string, prefix netip.Prefix) error {
	return n.onLink(dev, func(h *netlink.Handle, link netlink.Link) error {
		err := h.AddrReplace(link, &netlink.Addr{IPNet: ipNet(prefix), Flags: unix.IFA_F_NODAD})
		if err != nil || prefix.Addr().Is4() || prefix.Addr().IsLinkLocalUnicast() {
			return err
		}
		// The kernel adds the route some time after the address.
		return await(func() (bool, error) {
			routes, err := h.RouteGet(prefix.Addr().AsSlice())
			return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL, nil // an error: there is no route
		})
	})
}

// AddRoute adds a route. It is not an error if it already exists.
func (n *NS) AddRoute(r Route) error {
	return n.onLink(r.Dev, func(h *netlink.Handle, link netlink.Link) error {
		route := netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(r.Dst), Protocol: unix.RTPROT_STATIC}
		switch {
		case r.Via.IsValid():
			route.Gw = r.Via.AsSlice()
		case r.Dst.Addr().Is4():
			route.Scope = netlink.SCOPE_LINK
		}
		return h.RouteReplace(&route)
	})
}

// AddNeighbour adds a permanent neighbor entry for an address on a device's link.
func (n *NS) AddNeighbour(dev string, addr netip.Addr, mac net.HardwareAddr) error {
	return n.onLink(dev, func(h *netlink.Handle, link netlink.Link) error {
		return h.NeighSet(&netlink.Neigh{
			LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: mac,
		})
	})
}

// AddVeth creates a veth pair. Its devices are down.
func AddVeth(a, b End) error {
	h, err := a.NS.Netlink()
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = a.Dev, a.MAC
	err = h.LinkAdd(&netlink.Veth{
		LinkAttrs: attrs, PeerName: b.Dev, PeerHardwareAddr: b.MAC, PeerNamespace: netlink.NsFd(b.NS.Fd()),
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
	return n.onLink(dev, func(h *netlink.Handle, _ netlink.Link) error {
		return await(func() (bool, error) {
			link, err := h.LinkByName(dev)
			return err == nil && link.Attrs().OperState == netlink.OperUp, err
		})
	})
}

// await asks until something is so.
func await(so func() (bool, error)) error {
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if is, err := so(); is || err != nil {
			return err
		}
	}
	return os.ErrDeadlineExceeded
}

// onLink calls fn with the device and adds the names to its error.
func (n *NS) onLink(dev string, fn func(*netlink.Handle, netlink.Link) error) error {
	h, err := n.Netlink()
	if err != nil {
		return err
	}
	link, err := h.LinkByName(dev)
	if err == nil {
		err = fn(h, link)
	}
	if err != nil {
		return fmt.Errorf("%s: device %s: %w", n.name, dev, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().WithZone("").AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Family returns AF_INET or AF_INET6.
func Family(addr netip.Addr) int {
	if addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
