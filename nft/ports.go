package nft

import "nft-masq-agent/config"

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
	choices := make([]PortChoice, len(ranges))
	for i, r := range ranges {
		choices[i] = PortChoice{r, remaining}
		remaining -= r.Size()
	}
	return choices
}
