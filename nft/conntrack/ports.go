package conntrack

import (
	"context"
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

// Ports returns the ports among which the policy chose that of a connection which is seen as an address and port; false:
// the policy did not choose it. [judge.SourcePorts] returns one.
type Ports func(seenAs netip.AddrPort) (judge.PortScope, bool)

// Key returns the key of an entry; false if its source was not translated to one of the ports.
func (p Ports) Key(e *Entry) (k PortKey, ok bool) {
	switch e.Original.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		among, chosen := p(e.SeenAs())
		k = PortKey{e.Original.Protocol, e.SeenAs().Addr(), e.Destination(), among}
		return k, chosen && e.Status&SrcNAT != 0
	}
	return k, false
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

// Add counts an entry whose source was translated to one of the ports.
func (t Tally) Add(e *Entry, ports Ports) {
	k, ok := ports.Key(e)
	if ok && (t[k] > 0 || len(t) < maxKeys) {
		t[k]++
	}
}

// Share is the part of the ports that are in use.
func (u PortUse) Share() float64 { return float64(u.Used) / float64(u.Among.Ports) }

// Fullest returns the key with the largest share of ports in use, and that share; 0: there is none.
func (t Tally) Fullest() (fullest PortUse, share float64) {
	for k, used := range t {
		use := PortUse{k, used}
		if use.Share() > share {
			fullest = use
			share = use.Share()
		}
	}
	return fullest, share
}

// Pressure describes how close connection tracking is to its limits.
type Pressure struct {
	Stats
	// Fullest is the largest share of source ports in use.
	Fullest float64
}

// Pressure reads the counters and all connections whose source was translated to one of the ports.
func (t *Tracker) Pressure(ctx context.Context, ports Ports) (p Pressure, err error) {
	p.Stats, err = t.Stats()
	if err != nil {
		return Pressure{}, err
	}
	tally, err := t.Tally(ctx, ports)
	_, p.Fullest = tally.Fullest()
	return p, err
}

// Tally counts the source ports that connections use.
func (t *Tracker) Tally(ctx context.Context, ports Ports) (tally Tally, err error) {
	err = t.Dump(ctx, Filter{Translated: true}, func() { tally = Tally{} }, func(e *Entry) error {
		tally.Add(e, ports)
		return nil
	})
	return tally, err
}
