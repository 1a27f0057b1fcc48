package answer

import (
	"fmt"
	"net/netip"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/routes"
)

// A PortBlock is the block of source ports that a port is in, with portsPerPod.
type PortBlock struct {
	// Ports of the block, FIRST-LAST; of the node, ranges.
	Ports string `json:"sourcePorts"`
	// Node means that they are those of the node's own connections.
	Node bool `json:"node"`
	// LastBytes of the IPs of pods that have the block.
	LastBytes []int `json:"lastBytes,omitempty"`
	// Pods of this node that have the block.
	Pods []string `json:"pods,omitempty"`
}

// blockPorts returns the ports among which that of a connection is chosen.
func blockPorts(b nft.PortBlocks, c nft.Connection) string {
	if c.FromNode {
		return portRanges(b.NodePorts)
	}
	return b.Block(b.BlockOfPod(c.Src)).String()
}

// SetBlock adds whose block a port is in, and reports whether there is one. pods are those of this node, none if
// the connection is of another one.
func (c *Connections) SetBlock(p nft.Policy, seenAs netip.AddrPort, pods []routes.Pod) bool {
	ipv6 := seenAs.Addr().Is6()
	blocks := p.PortBlocks(ipv6)
	if blocks.Count() == 0 {
		c.Add(config.Error, "no-block", "pods have no blocks of source ports in %s: the config does not know pods by their "+
			"source there", nft.FamilyName(ipv6))
		return false
	}
	portsOf := judge.SourcePorts(p)
	scope, chosen := portsOf(seenAs)
	if !chosen {
		c.Add(config.Error, "no-block", "%s gives port %d to no connection of a pod", config.KeyPortsPerPod, seenAs.Port())
		return false
	}
	if scope.Block < 0 {
		c.Block = &PortBlock{Ports: portRanges(blocks.NodePorts), Node: true}
		return true
	}
	c.Block = &PortBlock{Ports: blocks.Block(scope.Block).String(), LastBytes: blocks.LastBytes(scope.Block)}
	family, _ := p.Family(ipv6)
	for _, pod := range pods {
		packet := nft.Connection{Src: pod.Address, InInterface: pod.Interface}
		if blocks.BlockOfPod(pod.Address) == scope.Block && judge.IsPod(family, packet) {
			c.Block.Pods = append(c.Block.Pods, pod.Address.String())
		}
	}
	c.Add(config.Note, "own-traffic", "the node itself or a client of a NodePort can have this port, too")
	return true
}

// String names the block, and who has it.
func (b *PortBlock) String() string {
	if b.Node {
		return "block of the node's own connections, " + b.Ports
	}
	bytes := strings.Trim(strings.ReplaceAll(fmt.Sprint(b.LastBytes), " ", ", "), "[]")
	text := fmt.Sprintf("block of pods whose IP has the last byte %s, %s", bytes, b.Ports)
	if len(b.Pods) > 0 {
		text += ": " + strings.Join(b.Pods, ", ")
	}
	return text
}
