package nft

import (
	"math"

	"nft-masq-agent/config"
)

// A PortRange is a range of ports, both ends included.
type PortRange = config.PortRange

// A PortChoice is a range and the probability with which it is chosen if no
// earlier range was: Size out of Remaining.
type PortChoice struct {
	PortRange
	Remaining uint32
}

// Last reports whether the range is always chosen when it is reached.
func (c PortChoice) Last() bool { return c.Size() == c.Remaining }

// PortChoices weights the ranges by their size.
func PortChoices(ranges []PortRange) []PortChoice {
	var remaining uint32
	for _, r := range ranges {
		remaining += r.Size()
	}
	out := make([]PortChoice, len(ranges))
	for i, r := range ranges {
		out[i] = PortChoice{r, remaining}
		remaining -= r.Size()
	}
	return out
}

// SourcePorts returns how many ports are available for masqueraded connections to
// one destination, and which ones: those of --to-ports, or all that the kernel uses for a
// source port of 1024 or more.
func (p Policy) SourcePorts() (n int, among func(port uint16) bool) {
	ranges := p.Ports
	if len(ranges) == 0 {
		ranges = []PortRange{{Min: 1024, Max: math.MaxUint16}}
	}
	var taken [math.MaxUint16 + 1]bool
	for _, r := range ranges {
		for port := int(r.Min); port <= int(r.Max); port++ {
			if !taken[port] {
				taken[port] = true
				n++
			}
		}
	}
	return n, func(port uint16) bool { return taken[port] }
}
