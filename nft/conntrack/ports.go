package conntrack

import (
	"net/netip"

	"nft-masq-agent/nft/judge"

	"golang.org/x/sys/unix"
)

// A PortKey is the scope in which a translated source port must be unique.
type PortKey struct {
	Protocol uint8
	From     netip.Addr      // the translated source address
	To       netip.AddrPort  // the destination
	Among    judge.PortScope // the port is one of these
}

// PortUse is the number of ports in use for a key.
type PortUse struct {
	PortKey
	Used int
}

// maxKeys bounds the memory of a tally.
const maxKeys = 1 << 14

// A Tally counts the source ports that translations use. Beyond 16,384 keys it has no more. The kernel's order is
// random, so the keys with the most ports are among the first ones.
type Tally map[PortKey]int

// Add counts an entry whose source was translated to a port that the policy chose. [judge.SourcePorts] returns the
// ports among which it did that.
func (t Tally) Add(e *Entry, ports func(seenAs netip.AddrPort) (among judge.PortScope, chosen bool)) {
	switch e.Original.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	default:
		return
	}
	among, chosen := ports(e.SeenAs())
	if !chosen || e.Status&SrcNAT == 0 {
		return
	}
	k := PortKey{e.Original.Protocol, e.SeenAs().Addr(), e.Destination(), among}
	if t[k] > 0 || len(t) < maxKeys {
		t[k]++
	}
}

// Share is the part of the ports that are in use, 0 for the zero value.
func (u PortUse) Share() float64 { return float64(u.Used) / float64(max(1, u.Among.Ports)) }

// Fullest returns the key with the largest share of ports in use, the zero value if none is in use.
func (t Tally) Fullest() (fullest PortUse) {
	for k, used := range t {
		use := PortUse{k, used}
		if use.Share() > fullest.Share() {
			fullest = use
		}
	}
	return fullest
}
