package conntrack

import (
	"net/netip"
	"slices"
	"time"

	"nft-masq-agent/nft"
)

// A Judge compares connections with a policy.
//
// A connection is stale if its translation contradicts the verdict that the policy
// has for a new one from the same source to the same destination, after DNAT: the
// destination sees another address than the source's though the policy exempts it,
// or the source's own though the policy masquerades it. The second includes
// connections that began before there was any NAT chain: the kernel decides once,
// at their first packet.
//
// Never stale is what says nothing about the policy:
//   - connections from or to the node itself, and to multicast;
//   - connections whose verdict depends on the interfaces;
//   - TCP and SCTP connections that are closed;
//   - a translation that a rule of another program, as it is now, can have made:
//     nobody can tell who made it. A rule for packets that kube-proxy or portmap
//     has marked counts if the destination was translated;
//   - connections from an address to itself, which a Service sends back to the pod
//     that called it: they work only if they are translated;
//   - connections of another zone than 0 whose source was never decided: Open
//     vSwitch and tc track connections in zones that never meet a NAT chain.
type Judge struct {
	policy *nft.Decider
	local  map[netip.Addr]bool
	ranges []netip.Prefix // of local addresses
	others func(src, dst netip.Addr, dnat bool) bool
}

// NewJudge makes a judge by a policy. local are the node's own addresses; others
// reports whether a rule of another program can rewrite the source of connections
// between two addresses.
func NewJudge(p nft.Policy, local []netip.Prefix, others func(src, dst netip.Addr, dnat bool) bool) *Judge {
	j := &Judge{policy: nft.NewDecider(p), local: map[netip.Addr]bool{}, others: others}
	for _, p := range local {
		if p.IsSingleIP() {
			j.local[p.Addr()] = true
		} else {
			j.ranges = append(j.ranges, p)
		}
	}
	return j
}

// Now returns the verdict about a new connection from the same source to the same
// destination; none if it depends on the interfaces, of which an entry says nothing.
func (j *Judge) Now(e *Entry) nft.Verdict {
	dst := e.Destination().Addr()
	src := e.Original.Src.Addr()
	v, certain := j.policy.Certain(nft.Connection{Src: src, Dst: dst, FromNode: j.isLocal(src), ToNode: j.isLocal(dst)})
	if !certain {
		return ""
	}
	return v
}

// Stale reports whether the translation contradicts the policy.
func (j *Judge) Stale(e *Entry) bool {
	src, dst := e.Original.Src.Addr(), e.Destination().Addr()
	translated := e.SeenAs().Addr() != src
	now := j.Now(e)
	switch {
	case !j.Forwarded(e):
		return false
	case e.Status&SrcNATDone == 0 && e.Zone != 0:
		return false
	case now == "", translated == (now == nft.Masqueraded):
		return false
	}
	return !translated || !j.others(src, dst, e.Original.Dst != e.Destination())
}

// Forwarded reports whether a connection is open, and neither from nor to the node
// itself, to multicast, or from an address to itself.
func (j *Judge) Forwarded(e *Entry) bool {
	src, dst := e.Original.Src.Addr(), e.Destination().Addr()
	return e.open() && src != dst && !dst.IsMulticast() && !j.isLocal(src) && !j.isLocal(dst)
}

func (j *Judge) isLocal(a netip.Addr) bool {
	return j.local[a] || slices.ContainsFunc(j.ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}

// open reports whether further packets of the connection are to be expected.
func (e *Entry) open() bool {
	switch e.State {
	case "TIME_WAIT", "CLOSE":
		return false
	case "CLOSED": // of SCTP, also before the answer to the first packet
		return e.Status&SeenReply == 0
	}
	return true
}

// sampleSize is the most entries that are looked at in one go.
const sampleSize = 200_000

// A Sample says how much of a table was looked at. The kernel's order is random,
// so what holds for the entries that were looked at holds for all.
type Sample struct {
	Looked  int // at so many entries
	Entries int // of so many
}

// Part reports whether there were more entries than were looked at.
func (s Sample) Part() bool { return s.Looked >= sampleSize && s.Entries > s.Looked }

// Sample is [Table.Dump] of no more than 200,000 entries.
func (t *Table) Sample(f Filter, start func() func(*Entry)) (Sample, error) {
	stats, err := t.Stats()
	if err != nil {
		return Sample{}, err
	}
	s := Sample{Entries: int(stats.Entries)}
	err = t.Dump(f, func() func(*Entry) error {
		s.Looked = 0
		visit := start()
		return func(e *Entry) error {
			visit(e)
			if s.Looked++; s.Looked >= sampleSize {
				return ErrStop
			}
			return nil
		}
	})
	return s, err
}

// Stale counts stale connections.
type Stale struct {
	Count  int       // estimated if only a part of the table was looked at
	Oldest time.Time // zero: not known
	Sample
}

// CountStale counts the connections whose translation contradicts the policy.
func (t *Table) CountStale(j *Judge) (Stale, error) {
	var s Stale
	sample, err := t.Sample(Filter{}, func() func(*Entry) {
		s = Stale{}
		return func(e *Entry) {
			if !j.Stale(e) {
				return
			}
			s.Count++
			if began := e.Started; !began.IsZero() && (s.Oldest.IsZero() || began.Before(s.Oldest)) {
				s.Oldest = began
			}
		}
	})
	s.Sample = sample
	if sample.Part() {
		s.Count = int(int64(s.Count) * int64(sample.Entries) / int64(sample.Looked))
	}
	return s, err
}
