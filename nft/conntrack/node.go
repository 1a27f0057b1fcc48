package conntrack

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/routes"
)

// A Node is what connections are judged by, besides the policy.
type Node struct {
	Local     []netip.Prefix // the node's own addresses
	Delivered []netip.Prefix // those, and of broadcast and anycast
	Networks  []routes.Network
	// Toward returns the interface by which packets from a source, or if it is not valid those of the node, leave to a
	// destination; "": that is not known. nil: it is known of none.
	Toward   func(src, dst netip.Addr) (string, error)
	Timeouts []Timeout
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
		text, err := os.ReadFile(filepath.Join(proc, "sys/net/netfilter", timeouts[i].Name))
		if err != nil {
			continue
		}
		seconds, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
		timeouts[i].Seconds = uint32(seconds)
	}
	return timeouts
}

// ReadNode reads it in the network namespace of the calling thread.
func ReadNode() (n Node, err error) {
	networks, err := routes.Networks()
	if err != nil {
		return n, err
	}
	for _, network := range networks {
		switch network.Type {
		case unix.RTN_LOCAL:
			n.Local = append(n.Local, network.Prefix)
			n.Delivered = append(n.Delivered, network.Prefix)
		case unix.RTN_BROADCAST, unix.RTN_ANYCAST:
			n.Delivered = append(n.Delivered, network.Prefix)
		case unix.RTN_UNICAST:
			if network.Main {
				n.Networks = append(n.Networks, network)
			}
		}
	}
	n.Toward = routes.Toward
	n.Timeouts = ReadTimeouts("/proc")
	return n, nil
}

// A environment is a [Node] in the form that is fast to ask.
type environment struct {
	local      judge.Addresses
	delivered  judge.Addresses
	interfaces map[netip.Prefix][]string // by network
	lengths    []int                     // of the networks, the longest first
	timeouts   []Timeout
	toward     func(src, dst netip.Addr) (string, error)
	lookups    map[[2]netip.Addr]string // interfaces by source and destination
}

// maxLookups is of how many pairs of addresses the kernel is asked for the route, each once.
const maxLookups = 1024

// interfaceTo returns the interface by which packets leave to a destination. From the node, that is also the one on
// which packets from there are expected. It is "" if it is not known.
func (s *environment) interfaceTo(src, dst netip.Addr) string {
	pair := [2]netip.Addr{src, dst}
	name, known := s.lookups[pair]
	if known || s.toward == nil || len(s.lookups) >= maxLookups {
		return name
	}
	name, _ = s.toward(src, dst) // "" with an error
	s.lookups[pair] = name
	return name
}

func newSurrounding(n Node) environment {
	s := environment{
		local:      judge.NewAddresses(n.Local),
		delivered:  judge.NewAddresses(append(slices.Clip(n.Delivered), netip.MustParsePrefix("255.255.255.255/32"))),
		interfaces: map[netip.Prefix][]string{},
		timeouts:   n.Timeouts,
		toward:     n.Toward,
		lookups:    map[[2]netip.Addr]string{},
	}
	for _, network := range n.Networks {
		if network.Bits() == 0 { // no bridge has everything on one link
			continue
		}
		s.interfaces[network.Prefix] = append(s.interfaces[network.Prefix], network.Interface)
		position, found := slices.BinarySearchFunc(s.lengths, network.Bits(), func(a, b int) int { return b - a })
		if !found {
			s.lengths = slices.Insert(s.lengths, position, network.Bits())
		}
	}
	return s
}

// behind returns the interfaces by which packets to an address leave.
func (s *environment) behind(a netip.Addr) []string {
	for _, bits := range s.lengths {
		network, err := a.Prefix(bits)
		if err != nil { // longer than an address of the family
			continue
		}
		if names := s.interfaces[network]; names != nil {
			return names
		}
	}
	return nil
}

// bridged reports whether two addresses are behind the same interface. If that is a bridge, or part
// of one, it may have forwarded what they exchange.
func (s *environment) bridged(a, b netip.Addr) bool {
	names := s.behind(a)
	if len(names) == 0 {
		return false
	}
	others := s.behind(b)
	return slices.ContainsFunc(names, func(name string) bool { return slices.Contains(others, name) })
}
