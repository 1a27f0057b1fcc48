package nft

import (
	"math"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
)

// PortBlocks are the source ports of pods with portsPerPod: connections of a pod get them from the block that the low
// bits of its IP select. The blocks depend on portsPerPod and toPorts alone, and must be the same in all versions, so
// that all nodes agree for ever.
type PortBlocks struct {
	Size      int         // ports of each block
	NodePorts []PortRange // for the node's own connections: those after the last block, at least as many as it has
	first     []uint16    // the first port of each block; their number is a power of two
}

// NewPortBlocks returns the blocks of a size in some port ranges or, if there are none, in 1024 to 65535. From the
// first port on, a block follows another; one that is not in the ranges as a whole is left out. Their number is the
// largest power of two, at most 256, that leaves one more block. If that is less than two, there are no blocks.
func NewPortBlocks(size int, ranges []PortRange) PortBlocks {
	if len(ranges) == 0 {
		ranges = []PortRange{AnyPort()}
	}
	var allowed [math.MaxUint16 + 2]bool // by port; the last one, which is no port, ends the last range
	lowest := math.MaxUint16
	for _, r := range ranges {
		lowest = min(lowest, int(r.Min))
		for port := int(r.Min); port <= int(r.Max); port++ {
			allowed[port] = true
		}
	}
	b := PortBlocks{Size: size}
	for port := lowest; size > 0 && port+size-1 <= math.MaxUint16 && len(b.first) <= buckets; port += size {
		if !slices.Contains(allowed[port:port+size], false) {
			b.first = append(b.first, uint16(port))
		}
	}
	count := buckets
	for count >= len(b.first) {
		count /= 2
		if count < 2 {
			return PortBlocks{}
		}
	}
	b.first = b.first[:count]
	start := 0
	for port := int(b.first[count-1]) + size; port < len(allowed); port++ {
		switch {
		case allowed[port] && start == 0:
			start = port
		case !allowed[port] && start > 0:
			b.NodePorts = append(b.NodePorts, PortRange{Min: uint16(start), Max: uint16(port - 1)})
			start = 0
		}
	}
	return b
}

// AnyPort returns the ports from which the kernel chooses for a source port of 1024 or more.
func AnyPort() PortRange { return PortRange{Min: 1024, Max: math.MaxUint16} }

// Count returns the number of blocks, 0 if they are off.
func (b PortBlocks) Count() int { return len(b.first) }

// Block returns the ports of a block. The blocks are numbered from 0.
func (b PortBlocks) Block(number int) PortRange {
	first := b.first[number]
	return PortRange{Min: first, Max: first + uint16(b.Size-1)}
}

// BlockOfPod returns the number of a pod's block. It panics if there are no blocks.
func (b PortBlocks) BlockOfPod(pod netip.Addr) int { return int(bucketOf(pod)) % b.Count() }

// BlockOf returns the number of the block that a port is in; false if it is in none.
func (b PortBlocks) BlockOf(port uint16) (number int, ok bool) {
	number = slices.IndexFunc(b.first, func(first uint16) bool { return port >= first && int(port) < int(first)+b.Size })
	return number, number >= 0
}

// LastBytes returns the last bytes of the addresses of the pods whose block this is.
func (b PortBlocks) LastBytes(number int) (endings []int) {
	for n := number; n < buckets; n += b.Count() {
		endings = append(endings, n)
	}
	return endings
}

// PortBlocks returns the blocks of a family: none without portsPerPod, or if the policy does not
// know which sources are pods.
func (p Policy) PortBlocks(ipv6 bool) PortBlocks {
	if f, enabled := p.Family(ipv6); enabled && f.KnowsPods() {
		return NewPortBlocks(p.PortsPerPod, p.Ports)
	}
	return PortBlocks{}
}

// checkPortBlocks returns an error if there is no room for the blocks of a config.
func checkPortBlocks(c config.Config, o Options) config.Problems {
	ranges := o.Ports
	if c.ToPorts != nil {
		ranges = *c.ToPorts
	}
	size := int(c.PortsPerPod)
	if size == 0 || NewPortBlocks(size, ranges).Count() > 0 {
		return nil
	}
	return config.Problems{{
		ID: "portsPerPod", Level: config.Error, Pos: c.Given(config.KeyPortsPerPod),
		Msg: config.KeyPortsPerPod + ": " + config.KeyToPorts + " has no room for two blocks and the node's own ports",
	}}
}
