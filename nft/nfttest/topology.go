package nfttest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"nft-masq-agent/nft/nfttest/netns"
)

// Topology is a pod, the node it runs on and an outside host, as drawn in the
// package documentation. The node forwards packets and has no rules. Addresses
// that none of the three has are routed to the outside host.
type Topology struct {
	Pod, Node, Outside *NS

	PodV4, PodV6         netip.Addr
	GatewayV4, GatewayV6 netip.Addr // the node, as the pod sees it
	NodeV4, NodeV6       netip.Addr // the node, as the world sees it
	OutsideV4, OutsideV6 netip.Addr

	mu     sync.Mutex
	owners map[netip.Addr]*NS
}

// OpenTopology builds a Topology.
func OpenTopology() (*Topology, error) {
	t := &Topology{
		PodV4: netip.MustParseAddr("10.244.1.2"), PodV6: netip.MustParseAddr("fd00:10:244:1::2"),
		GatewayV4: netip.MustParseAddr("10.244.1.1"), GatewayV6: netip.MustParseAddr("fd00:10:244:1::1"),
		NodeV4: netip.MustParseAddr("192.0.2.1"), NodeV6: netip.MustParseAddr("2001:db8::1"),
		OutsideV4: netip.MustParseAddr("192.0.2.100"), OutsideV6: netip.MustParseAddr("2001:db8::100"),
		owners: map[netip.Addr]*NS{},
	}
	if err := t.build(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// Close closes the three namespaces.
func (t *Topology) Close() error {
	var errs []error
	for _, ns := range []*NS{t.Pod, t.Node, t.Outside} {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}

func (t *Topology) build() error {
	for _, step := range []func() error{t.namespaces, t.cables, t.addresses, t.routes, t.extraAddrs} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (t *Topology) namespaces() (err error) {
	if t.Pod, err = OpenNS("pod"); err != nil {
		return err
	}
	if t.Node, err = OpenNS("node"); err != nil {
		return err
	}
	if t.Outside, err = OpenNS("outside"); err != nil {
		return err
	}
	return errors.Join(
		prepare(t.Pod), prepare(t.Node), prepare(t.Outside),
		t.Node.Sysctl("net.ipv4.ip_forward", "1"),
		t.Node.Sysctl("net.ipv6.conf.all.forwarding", "1"))
}

// prepare sets what must be set before the devices exist.
func prepare(n *NS) error {
	for _, s := range [][2]string{
		{"net.ipv4.conf.all.rp_filter", "0"}, // the stricter of "all" and the device's applies
		{"net.ipv4.conf.default.rp_filter", "0"},
		{"net.ipv4.conf.all.send_redirects", "0"},
		{"net.ipv4.conf.default.send_redirects", "0"},
		{"net.ipv6.conf.all.disable_ipv6", "0"},
		{"net.ipv6.conf.default.disable_ipv6", "0"},
		{"net.ipv6.conf.default.addr_gen_mode", "1"}, // no link-local addresses except ours
		{"net.ipv6.conf.default.router_solicitations", "0"},
	} {
		if err := n.Sysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	return n.LinkUp("lo")
}

func (t *Topology) pod() netns.End {
	return netns.End{NS: t.Pod, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 1, 2}}
}

func (t *Topology) gateway() netns.End {
	return netns.End{NS: t.Node, Dev: "pod0", MAC: net.HardwareAddr{2, 0, 0, 0, 1, 1}}
}

func (t *Topology) node() netns.End {
	return netns.End{NS: t.Node, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 2, 1}}
}

func (t *Topology) outside() netns.End {
	return netns.End{NS: t.Outside, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 2, 2}}
}

func (t *Topology) cables() error {
	if err := netns.AddVeth(t.pod(), t.gateway()); err != nil {
		return err
	}
	if err := netns.AddVeth(t.node(), t.outside()); err != nil {
		return err
	}
	ends := []netns.End{t.pod(), t.gateway(), t.node(), t.outside()}
	for _, e := range ends {
		if err := e.NS.LinkUp(e.Dev); err != nil {
			return err
		}
	}
	for _, e := range ends {
		if err := e.NS.AwaitCarrier(e.Dev); err != nil {
			return err
		}
	}
	return nil
}

func (t *Topology) addresses() error {
	for _, a := range []struct {
		end, peer netns.End
		addr      netip.Addr
		bits      int
	}{
		// Only the pod itself is on the pod's link: the rest of the pod CIDR is
		// outside.
		{t.pod(), t.gateway(), t.PodV4, 32},
		{t.pod(), t.gateway(), t.PodV6, 128},
		{t.pod(), t.gateway(), netip.MustParseAddr("fe80::2"), 64},
		{t.gateway(), t.pod(), t.GatewayV4, 32},
		{t.gateway(), t.pod(), t.GatewayV6, 128},
		{t.gateway(), t.pod(), netip.MustParseAddr("fe80::1"), 64},
		{t.node(), t.outside(), t.NodeV4, 24},
		{t.node(), t.outside(), t.NodeV6, 64},
		{t.node(), t.outside(), netip.MustParseAddr("fe80::1"), 64},
		{t.outside(), t.node(), t.OutsideV4, 24},
		{t.outside(), t.node(), t.OutsideV6, 64},
		{t.outside(), t.node(), netip.MustParseAddr("fe80::100"), 64},
	} {
		if err := t.assign(a.end, a.peer, netip.PrefixFrom(a.addr, a.bits)); err != nil {
			return err
		}
	}
	return nil
}

// assign gives a device an address and adds it as a neighbor at the other end of
// the cable: the kernel needs a moment before it answers a neighbor solicitation
// for a new IPv6 address, and the next one follows a second later.
func (t *Topology) assign(e, peer netns.End, prefix netip.Prefix) error {
	if err := e.NS.AddAddr(e.Dev, prefix); err != nil {
		return err
	}
	t.owners[prefix.Addr()] = e.NS
	return peer.NS.AddNeighbour(peer.Dev, prefix.Addr(), e.MAC)
}

func (t *Topology) routes() error {
	all4, all6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	for _, r := range []struct {
		ns *NS
		netns.Route
	}{
		{t.Pod, netns.Route{Dst: host(t.GatewayV4), Dev: "eth0"}},
		{t.Pod, netns.Route{Dst: host(t.GatewayV6), Dev: "eth0"}},
		{t.Pod, netns.Route{Dst: all4, Via: t.GatewayV4, Dev: "eth0"}},
		{t.Pod, netns.Route{Dst: all6, Via: t.GatewayV6, Dev: "eth0"}},
		{t.Node, netns.Route{Dst: host(t.PodV4), Dev: "pod0"}},
		{t.Node, netns.Route{Dst: host(t.PodV6), Dev: "pod0"}},
		{t.Node, netns.Route{Dst: all4, Via: t.OutsideV4, Dev: "eth0"}},
		{t.Node, netns.Route{Dst: all6, Via: t.OutsideV6, Dev: "eth0"}},
		{t.Outside, netns.Route{Dst: all4, Via: t.NodeV4, Dev: "eth0"}},
		{t.Outside, netns.Route{Dst: all6, Via: t.NodeV6, Dev: "eth0"}},
	} {
		if err := r.ns.AddRoute(r.Route); err != nil {
			return err
		}
	}
	return nil
}

// extraAddrs gives the outside host one address of each range that an agent
// treats specially.
func (t *Topology) extraAddrs() error {
	for _, s := range []string{
		"198.51.100.1", "203.0.113.9",
		"10.9.0.9", "172.16.9.9", "192.168.9.9",
		"100.64.0.9", "198.18.0.9", "169.254.169.254",
		"2001:db8:1::1", "fd00:9::9",
	} {
		if err := t.AddAddr(t.Outside, netip.MustParseAddr(s)); err != nil {
			return err
		}
	}
	return nil
}

// AddAddr gives one of the three hosts another address, which the others can
// reach. It is not an error if that host already has it.
func (t *Topology) AddAddr(owner *NS, addr netip.Addr) error {
	addr = addr.WithZone("")
	t.mu.Lock()
	defer t.mu.Unlock()
	if has := t.owners[addr]; has != nil {
		if has != owner {
			return fmt.Errorf("%s: address %s belongs to %s", owner, addr, has)
		}
		return nil
	}
	switch owner {
	case t.Pod:
		if err := t.assign(t.pod(), t.gateway(), host(addr)); err != nil {
			return err
		}
		return t.Node.AddRoute(netns.Route{Dst: host(addr), Dev: t.gateway().Dev})
	case t.Node:
		return t.assign(t.node(), t.outside(), host(addr))
	case t.Outside:
		return t.assign(t.outside(), t.node(), host(addr))
	}
	return fmt.Errorf("%s: not in this topology", owner)
}

// owner returns the host that receives packets from the given one to addr. If no
// host has the address, it assigns it to the outside host.
func (t *Topology) owner(from *NS, addr netip.Addr) (*NS, error) {
	addr = addr.WithZone("")
	switch {
	case addr.IsLoopback():
		return from, nil
	case addr.IsMulticast(), addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}), addr == broadcastOf(t.NodeV4):
		return t.Outside, nil
	}
	t.mu.Lock()
	owner := t.owners[addr]
	t.mu.Unlock()
	if owner != nil {
		return owner, nil
	}
	return t.Outside, t.AddAddr(t.Outside, addr)
}

// broadcastOf returns the broadcast address of the /24 around addr.
func broadcastOf(addr netip.Addr) netip.Addr {
	b := addr.As4()
	b[3] = 255
	return netip.AddrFrom4(b)
}

// host returns the prefix that contains only addr.
func host(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }
