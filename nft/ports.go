package nft

import (
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

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
	choices := make([]PortChoice, len(ranges))
	for i, r := range ranges {
		choices[i] = PortChoice{r, remaining}
		remaining -= r.Size()
	}
	return choices
}

// A Protocol is a transport protocol.
type Protocol uint8

// PortProtocols are the protocols whose ports --to-ports restricts.
func PortProtocols() []Protocol {
	return []Protocol{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}
}

// String returns the name of the protocol.
func (p Protocol) String() string {
	switch p {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "ipv6-icmp"
	}
	return fmt.Sprint(uint8(p))
}

// Match returns the expressions that match its packets.
func (p Protocol) Match() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: []byte{byte(p)}},
	}
}
