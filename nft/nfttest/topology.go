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

	ends   [4]netns.End // of two cables: pod and gateway, node and outside
	mu     sync.Mutex
	owners map[netip.Addr]*NS
}

// The places of the ends. The other end of a cable differs in the last bit.
const (
	podEnd = iota
	gatewayEnd
	nodeEnd
	outsideEnd
)

// OpenTopology builds a Topology.
func OpenTopology() (*Topology, error) {
	t := &Topology{
		PodV4: netip.MustParseAddr("10.244.1.2"), PodV6: netip.MustParseAddr("fd00:10:244:1::2"),
		GatewayV4: netip.MustParseAddr("10.244.1.1"), GatewayV6: netip.MustParseAddr("fd00:10:244:1::1"),
		NodeV4: netip.MustParseAddr("192.0.2.1"), NodeV6: netip.MustParseAddr("2001:db8::1"),
		OutsideV4: netip.MustParseAddr("192.0.2.100"), OutsideV6: netip.MustParseAddr("2001:db8::100"),
		owners: map[netip.Addr]*NS{},
	}
	if err := Part(t.build); err != nil {
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

func (t *Topology) build() {
	t.Pod = Must(netns.Open("pod"))
	t.Node = Must(netns.Open("node"))
	t.Outside = Must(netns.Open("outside"))
	for _, n := range []*NS{t.Pod, t.Node, t.Outside} {
		prepare(n)
	}
	Check(t.Node.Sysctl("net.ipv4.ip_forward", "1"))
	Check(t.Node.Sysctl("net.ipv6.conf.all.forwarding", "1"))
	t.cables()
	t.addresses()
	t.routes()
}

// prepare sets what must be set before the devices exist.
func prepare(n *NS) {
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
		Check(n.Sysctl(s[0], s[1]))
	}
	Check(n.LinkUp("lo"))
}

func (t *Topology) cables() {
	t.ends = [4]netns.End{
		podEnd:     {NS: t.Pod, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 1, 2}},
		gatewayEnd: {NS: t.Node, Dev: "pod0", MAC: net.HardwareAddr{2, 0, 0, 0, 1, 1}},
		nodeEnd:    {NS: t.Node, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 2, 1}},
		outsideEnd: {NS: t.Outside, Dev: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 2, 2}},
	}
	Check(netns.AddVeth(t.ends[podEnd], t.ends[gatewayEnd]))
	Check(netns.AddVeth(t.ends[nodeEnd], t.ends[outsideEnd]))
	for _, e := range t.ends {
		Check(e.NS.LinkUp(e.Dev))
	}
	for _, e := range t.ends {
		Check(e.NS.AwaitCarrier(e.Dev))
	}
}

// addresses assigns those of the links, and to the outside host one of each range that an agent treats specially.
func (t *Topology) addresses() {
	for end, prefixes := range [4][]netip.Prefix{
		// Only the pod itself is on the pod's link: the rest of the pod CIDR is
		// outside.
		podEnd:     {host(t.PodV4), host(t.PodV6), netip.MustParsePrefix("fe80::2/64")},
		gatewayEnd: {host(t.GatewayV4), host(t.GatewayV6), netip.MustParsePrefix("fe80::1/64")},
		nodeEnd: {
			netip.PrefixFrom(t.NodeV4, 24), netip.PrefixFrom(t.NodeV6, 64), netip.MustParsePrefix("fe80::1/64"),
		},
		outsideEnd: {
			netip.PrefixFrom(t.OutsideV4, 24), netip.PrefixFrom(t.OutsideV6, 64), netip.MustParsePrefix("fe80::100/64"),
		},
	} {
		for _, prefix := range prefixes {
			Check(t.assign(end, prefix))
		}
	}
	for _, s := range []string{
		"198.51.100.1", "203.0.113.9",
		"10.9.0.9", "172.16.9.9", "192.168.9.9",
		"100.64.0.9", "198.18.0.9", "169.254.169.254",
		"2001:db8:1::1", "fd00:9::9",
	} {
		Check(t.assign(outsideEnd, host(netip.MustParseAddr(s))))
	}
}

// assign gives a device an address and adds it as a neighbor at the other end of
// the cable: the kernel needs a moment before it answers a neighbor solicitation
// for a new IPv6 address, and the next one follows a second later.
func (t *Topology) assign(end int, prefix netip.Prefix) error {
	e, peer := t.ends[end], t.ends[end^1]
	if err := e.NS.AddAddr(e.Dev, prefix); err != nil {
		return err
	}
	t.owners[prefix.Addr()] = e.NS
	return peer.NS.AddNeighbour(peer.Dev, prefix.Addr(), e.MAC)
}

func (t *Topology) routes() {
	none, all4, all6 := netip.Addr{}, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	for _, r := range []struct {
		ns  *NS
		dst netip.Prefix
		via netip.Addr
		dev string
	}{
		{t.Pod, host(t.GatewayV4), none, "eth0"},
		{t.Pod, host(t.GatewayV6), none, "eth0"},
		{t.Pod, all4, t.GatewayV4, "eth0"},
		{t.Pod, all6, t.GatewayV6, "eth0"},
		{t.Node, host(t.PodV4), none, "pod0"},
		{t.Node, host(t.PodV6), none, "pod0"},
		{t.Node, all4, t.OutsideV4, "eth0"},
		{t.Node, all6, t.OutsideV6, "eth0"},
		{t.Outside, all4, t.NodeV4, "eth0"},
		{t.Outside, all6, t.NodeV6, "eth0"},
	} {
		Check(r.ns.AddRoute(netns.Route{Dst: r.dst, Via: r.via, Dev: r.dev}))
	}
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
		return errors.Join(t.assign(podEnd, host(addr)), t.Node.AddRoute(netns.Route{Dst: host(addr), Dev: "pod0"}))
	case t.Node:
		return t.assign(nodeEnd, host(addr))
	case t.Outside:
		return t.assign(outsideEnd, host(addr))
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
	case addr.IsMulticast(), addr == netip.MustParseAddr("255.255.255.255"), addr == netip.MustParseAddr("192.0.2.255"):
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

// host returns the prefix that contains only addr.
func host(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }
