package judge

import (
	"math"
	"net/netip"

	"nft-masq-agent/nft"
)

// A PortScope is the ports among which that of a connection is chosen.
type PortScope struct {
	Block int // number of the block; -1: it is in none
	Ports int // how many there are
}

// SourcePorts returns a function that tells among which ports that of a masqueraded connection
// was chosen; false: by this policy, it was not. They are those of a pod's block or of the
// node, those of toPorts, or all that the kernel uses for a source port of 1024 or more.
func SourcePorts(p nft.Policy) func(seenAs netip.AddrPort) (PortScope, bool) {
	ranges := p.Ports
	if len(ranges) == 0 {
		ranges = []nft.PortRange{nft.AnyPort()}
	}
	allowed := newPortSet(ranges)
	blocks := map[bool]nft.PortBlocks{false: p.PortBlocks(false), true: p.PortBlocks(true)}
	nodes := map[bool]portSet{false: newPortSet(blocks[false].NodePorts), true: newPortSet(blocks[true].NodePorts)}
	return func(seenAs netip.AddrPort) (PortScope, bool) {
		ipv6 := seenAs.Addr().Is6()
		port := seenAs.Port()
		b := blocks[ipv6]
		set := allowed
		if b.Count() > 0 {
			if number, ok := b.BlockOf(port); ok {
				return PortScope{number, b.Size}, true
			}
			set = nodes[ipv6]
		}
		return PortScope{-1, set.size}, set.members[port]
	}
}

// A portSet is a set of ports.
type portSet struct {
	members *[math.MaxUint16 + 1]bool
	size    int
}

func newPortSet(ranges []nft.PortRange) portSet {
	s := portSet{members: new([math.MaxUint16 + 1]bool)}
	for _, r := range ranges {
		for port := int(r.Min); port <= int(r.Max); port++ {
			if !s.members[port] {
				s.members[port] = true
				s.size++
			}
		}
	}
	return s
}
