package conntrack

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/routes"
)

// A Node is what connections are judged by, besides the policy. It remembers routes, so it is for one goroutine.
type Node struct {
	delivered  nft.List                  // that the node receives itself: its own, and those of broadcast and anycast
	interfaces map[netip.Prefix][]string // by the network that packets to it leave for
	lengths    []int                     // of the networks, the longest first
	timeouts   []Timeout
	toward     func(src, dst netip.Addr) (string, error) // nil: no route is known
	lookups    map[[2]netip.Addr]string                  // interfaces by source and destination
}

// ReadNode reads it in the network namespace of the calling thread.
func ReadNode() (*Node, error) {
	networks, err := routes.Networks()
	if err != nil {
		return nil, err
	}
	return newNode(networks, routes.Toward, ReadTimeouts("/proc")), nil
}

// newNode returns a node with routes. toward returns the interface by which packets from a source, or if that is not
// valid those of the node, leave to a destination.
func newNode(
	networks []routes.Network, toward func(src, dst netip.Addr) (string, error), timeouts []Timeout,
) *Node {
	n := &Node{
		interfaces: map[netip.Prefix][]string{}, timeouts: timeouts, toward: toward, lookups: map[[2]netip.Addr]string{},
	}
	delivered := []config.CIDR{{Prefix: netip.MustParsePrefix("255.255.255.255/32")}}
	for _, network := range networks {
		switch network.Type {
		case unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_ANYCAST:
			delivered = append(delivered, config.CIDR{Prefix: network.Prefix})
		case unix.RTN_UNICAST:
			// A default route says nothing about who shares a link.
			if network.Main && network.Bits() > 0 {
				n.addNetwork(network)
			}
		}
	}
	n.delivered = nft.NewList(delivered)
	return n
}

func (n *Node) addNetwork(network routes.Network) {
	n.interfaces[network.Prefix] = append(n.interfaces[network.Prefix], network.Interface)
	position, found := slices.BinarySearchFunc(n.lengths, network.Bits(), func(a, b int) int { return b - a })
	if !found {
		n.lengths = slices.Insert(n.lengths, position, network.Bits())
	}
}

// maxLookups bounds for how many pairs of addresses the kernel is asked for a route.
const maxLookups = 1024

// interfaceTo returns the interface by which packets leave to a destination. From the node, that is also the one on
// which packets from there are expected. It is "" if it is not known.
func (n *Node) interfaceTo(src, dst netip.Addr) string {
	pair := [2]netip.Addr{src, dst}
	name, known := n.lookups[pair]
	if known || n.toward == nil || len(n.lookups) >= maxLookups {
		return name
	}
	name, _ = n.toward(src, dst) // "" with an error
	n.lookups[pair] = name
	return name
}

// behind returns the interfaces by which packets to an address leave.
func (n *Node) behind(a netip.Addr) []string {
	for _, bits := range n.lengths {
		network, _ := a.Prefix(bits) // not valid if that is longer than an address of the family
		if names := n.interfaces[network]; names != nil {
			return names
		}
	}
	return nil
}

// bridged reports whether two addresses are behind the same interface. If that is a bridge, or part
// of one, it may have forwarded what they exchange.
func (n *Node) bridged(a, b netip.Addr) bool {
	names := n.behind(a)
	if len(names) == 0 {
		return false
	}
	others := n.behind(b)
	return slices.ContainsFunc(names, func(name string) bool { return slices.Contains(others, name) })
}

// A Timeout is a setting of the kernel: for how many seconds a connection of a protocol without a reply is kept after
// a packet. A connection that has less left had no packet since.
type Timeout struct {
	Protocol uint8
	Name     string // in net.netfilter
	Default  uint32
	Seconds  uint32 // 0: not known
}

// HidesSilence reports whether connections without a reply are forgotten before they count as silent.
func (t Timeout) HidesSilence() bool { return t.Seconds > 0 && t.Seconds <= silentAfter }

// ReadTimeouts reads the timeouts in the network namespace of the calling thread, from a mount point of procfs.
func ReadTimeouts(proc string) []Timeout {
	timeouts := []Timeout{
		{Protocol: unix.IPPROTO_TCP, Name: "nf_conntrack_tcp_timeout_syn_sent", Default: 120},
		{Protocol: unix.IPPROTO_UDP, Name: "nf_conntrack_udp_timeout", Default: 30},
		{Protocol: unix.IPPROTO_ICMP, Name: "nf_conntrack_icmp_timeout", Default: 30},
		{Protocol: unix.IPPROTO_ICMPV6, Name: "nf_conntrack_icmpv6_timeout", Default: 30},
	}
	for i := range timeouts {
		text, _ := os.ReadFile(filepath.Join(proc, "sys/net/netfilter", timeouts[i].Name))
		seconds, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
		timeouts[i].Seconds = uint32(seconds)
	}
	return timeouts
}
