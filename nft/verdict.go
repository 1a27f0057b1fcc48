package nft

import (
	"net/netip"
	"strings"
)

// Verdict is the decision about a new connection.
type Verdict string

// The verdicts, named like the counters.
const (
	Local       Verdict = "local"       // to an address of this node: never masqueraded
	Exempt      Verdict = "exempt"      // not masqueraded by us
	Masqueraded Verdict = "masqueraded" // masqueraded as the node's address
)

// A Connection is a connection as a policy sees it, by its first packet as that leaves: the addresses, whether they are
// addresses of this node, and the names of the input and the output interface. The node's own traffic has no input
// interface.
type Connection struct {
	Src, Dst                  netip.Addr
	FromNode, ToNode          bool
	InInterface, OutInterface string
}

// FamilyName returns the name of an address family in texts.
func FamilyName(ipv6 bool) string {
	if ipv6 {
		return "IPv6"
	}
	return "IPv4"
}

// FamilyKey returns the name of an address family as a label or a value.
func FamilyKey(ipv6 bool) string { return strings.ToLower(FamilyName(ipv6)) }

// Counts is the number of connections of a family with a verdict, or of packets that are
// [Invalid], since the counters were created.
type Counts struct {
	IPv6    bool
	Verdict Verdict
	Packets uint64 // in a nat chain, a counter counts connections
}

// Invalid stands for packets of pods that were dropped, because they belong to no
// connection.
const Invalid Verdict = "invalid"
