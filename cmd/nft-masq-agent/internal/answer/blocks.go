package answer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
)

// A PortBlock is the block of source ports that a port is in, with portsPerPod.
type PortBlock struct {
	// Ports of the block, FIRST-LAST; of the node, ranges.
	Ports string `json:"sourcePorts"`
	// Node means that they are those of the node's own connections.
	Node bool `json:"node"`
	// LastBytes of the IPs of pods that have the block.
	LastBytes []int `json:"lastBytes,omitempty"`
	// Pods that have the block: of this node or, if it does not have the rules of this config, of --pod-cidr.
	Pods []string `json:"pods,omitempty"`
	// More is the number of addresses of --pod-cidr that are not listed.
	More int `json:"morePodCount,omitempty"`
}

// fromSources returns what reports whether connections of a pod are masqueraded, by its address.
func fromSources(p nft.Policy) func(pod netip.Addr) bool {
	only, never := map[bool][]iprange.Range{}, map[bool][]iprange.Range{} // by whether it is IPv6
	for _, f := range p.Families {
		only[f.IPv6] = iprange.SetOf(f.List(config.KeyMasqueradeSrcCIDRs).Prefixes())
		never[f.IPv6] = iprange.SetOf(f.List(config.KeyNonMasqueradeSrcCIDRs).Prefixes())
	}
	return func(pod netip.Addr) bool {
		of := only[pod.Is6()]
		return (len(of) == 0 || iprange.Contains(of, pod)) && !iprange.Contains(never[pod.Is6()], pod)
	}
}

// AddressesOf returns the addresses of CIDRs, each once; of CIDRs with more than 65,536, a note.
func AddressesOf(cidrs []netip.Prefix) (all []netip.Addr, notes config.Problems) {
	var small []netip.Prefix
	for _, p := range cidrs {
		if p.Addr().BitLen()-p.Bits() <= 16 {
			small = append(small, p)
			continue
		}
		notes = append(notes, problem(config.Note, "no-pods", nowhere,
			"%s has too many addresses to list: give the podCIDR of a node with --pod-cidr", p))
	}
	for _, r := range iprange.SetOf(small) {
		for a := r.From; a.IsValid() && !r.To.Less(a); a = a.Next() {
			all = append(all, a)
		}
	}
	return all, notes
}

// blockPorts returns the ports among which that of a connection is chosen.
func blockPorts(b nft.PortBlocks, c nft.Connection) string {
	if c.FromNode {
		return portRanges(b.Node)
	}
	return b.Block(b.Of(c.Src)).String()
}

// SetBlock adds whose block a port is in, and returns notes about it; false without blocks. pods are
// those of this node, nil if the connection is of another one: then those of the CIDRs may
// have it.
func (c *Connections) SetBlock(
	p nft.Policy, seenAs netip.AddrPort, pods []netip.Addr, podCIDRs []netip.Prefix,
) (notes config.Problems, ok bool) {
	ipv6 := seenAs.Addr().Is6()
	b := p.PortBlocks(ipv6)
	if p.PortsPerPod == 0 {
		return nil, false
	}
	if b.Count() == 0 {
		return config.Problems{problem(config.Note, "no-block", nowhere,
			"pods have no blocks of source ports in %s: the config does not know pods by their source there",
			familyName(ipv6))}, true
	}
	f, _ := p.Family(ipv6)
	scope, chosen := judge.SourcePorts(p)(seenAs)
	if chosen && scope.Block < 0 {
		c.Block = &PortBlock{Ports: portRanges(b.Node), Node: true}
		return nil, true
	}
	if !judge.MasqueradesNode(f, seenAs.Addr()) {
		notes = append(notes, problem(config.Note, "own-traffic", nowhere,
			"the connection can also be the node's own, which keeps its port, if that is in net.ipv4.ip_local_port_range"))
	}
	if !chosen {
		return append(notes, problem(config.Note, "no-block", nowhere, "%s gives port %d to no connection of a pod",
			config.KeyPortsPerPod, seenAs.Port())), true
	}
	c.Block = &PortBlock{Ports: b.Block(scope.Block).String(), LastBytes: b.LastBytes(scope.Block)}
	isSource := fromSources(p)
	for _, pod := range pods {
		if b.Of(pod) == scope.Block && isSource(pod) {
			c.Block.Pods = append(c.Block.Pods, pod.String())
		}
	}
	if pods == nil {
		notes = append(notes, c.Block.ofCIDRs(podCIDRs, ipv6, isSource)...)
	}
	return notes, true
}

// OfAnotherNode answers by the blocks of a config's portsPerPod alone, because this node does not
// have its rules; false without blocks.
func (c *Connections) OfAnotherNode(p nft.Policy, seenAs netip.AddrPort, podCIDRs []netip.Prefix) (
	notes config.Problems, ok bool,
) {
	if notes, ok = c.SetBlock(p, seenAs, nil, podCIDRs); ok {
		c.Connections = []Connection{}
		c.Behind(seenAs, nil)
		for i := range notes {
			if notes[i].ID == "no-block" { // nothing is known of it
				notes[i].Level = config.Error
			}
		}
		notes = append(notes, problem(config.Note, "another-node", nowhere,
			"this is by the config alone, because this node does not have its rules: no connection was looked for"))
	}
	return notes, ok
}

// ofCIDRs adds the first addresses of CIDRs that have the block, and returns notes.
func (b *PortBlock) ofCIDRs(cidrs []netip.Prefix, ipv6 bool, isSource func(netip.Addr) bool) config.Problems {
	const most = 8
	all, notes := AddressesOf(cidrs)
	for _, a := range all {
		bytes := a.AsSlice()
		switch {
		case a.Is6() != ipv6 || !slices.Contains(b.LastBytes, int(bytes[len(bytes)-1])) || !isSource(a):
		case len(b.Pods) < most:
			b.Pods = append(b.Pods, a.String())
		default:
			b.More++
		}
	}
	if len(cidrs) > 0 && len(notes) == 0 && len(b.Pods) == 0 {
		notes = config.Problems{problem(config.Note, "no-pods", nowhere,
			"no masqueraded address of --pod-cidr has this block")}
	}
	return notes
}

// String names the block, and who has it.
func (b *PortBlock) String() string {
	if b.Node {
		return "block of the node's own connections, " + b.Ports
	}
	text := fmt.Sprintf("block of pods whose IP has the last byte %s, %s", numbers(b.LastBytes), b.Ports)
	if len(b.Pods) > 0 {
		text += ": " + strings.Join(b.Pods, ", ")
	}
	if b.More > 0 {
		text += fmt.Sprintf(" and %d more", b.More)
	}
	return text
}

func numbers(all []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(all), " ", ", "), "[]")
}
