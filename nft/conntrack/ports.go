package conntrack

import (
	"cmp"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// A PortKey is the scope in which a translated source port must be unique.
type PortKey struct {
	Protocol uint8
	From     netip.Addr     // the translated source address
	To       netip.AddrPort // the destination
}

// PortUse is the number of ports in use for a key.
type PortUse struct {
	PortKey
	Used int
}

// maxKeys bounds the memory of a tally.
const maxKeys = 1 << 14

// A Tally counts the source ports that translations use. Its memory is bounded:
// with more than 16,384 keys, all counts are too low by up to one for every
// 16,384 entries, and keys with few ports are forgotten (Misra and Gries, 1982).
type Tally map[PortKey]int

// Add counts an entry whose source was translated.
func (t Tally) Add(e *Entry) {
	k := e.portKey()
	if !k.Is(e) {
		return
	}
	if _, known := t[k]; !known && len(t) >= maxKeys {
		for k := range t {
			if t[k]--; t[k] == 0 {
				delete(t, k)
			}
		}
		return
	}
	t[k]++
}

func (e *Entry) portKey() PortKey {
	return PortKey{e.Original.Protocol, e.SeenAs().Addr(), e.Destination()}
}

// Is reports whether an entry uses one of the key's ports.
func (k PortKey) Is(e *Entry) bool {
	switch e.Original.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		return e.portKey() == k && e.Status&SrcNAT != 0
	}
	return false
}

// Fullest returns the n keys with the most ports in use, or fewer.
func (t Tally) Fullest(n int) []PortUse {
	all := make([]PortUse, 0, len(t))
	for k, used := range t {
		all = append(all, PortUse{k, used})
	}
	slices.SortStableFunc(all, func(a, b PortUse) int {
		return cmp.Or(
			cmp.Compare(b.Used, a.Used), cmp.Compare(a.Protocol, b.Protocol), a.From.Compare(b.From), a.To.Compare(b.To),
		)
	})
	return all[:min(n, len(all))]
}

// A PortGroup is the family and protocol by which ports are grouped.
type PortGroup struct {
	IPv6     bool
	Protocol uint8
}

// Pressure describes how close connection tracking is to its limits.
type Pressure struct {
	Stats
	// Fullest is, for each group, the most ports that connections to one
	// destination use.
	Fullest map[PortGroup]int
}

// Pressure reads the counters and all connections whose source was translated.
func (t *Table) Pressure() (Pressure, error) {
	stats, err := t.Stats()
	if err != nil {
		return Pressure{}, err
	}
	var tally Tally
	err = t.Dump(Filter{Translated: true}, func() func(*Entry) error {
		tally = Tally{}
		return func(e *Entry) error {
			tally.Add(e)
			return nil
		}
	})
	if err != nil {
		return Pressure{}, err
	}
	p := Pressure{Stats: stats, Fullest: map[PortGroup]int{}}
	for k, used := range tally {
		g := PortGroup{k.From.Is6(), k.Protocol}
		p.Fullest[g] = max(p.Fullest[g], used)
	}
	return p, nil
}
