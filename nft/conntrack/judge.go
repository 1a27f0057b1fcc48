package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
)

// A Judge compares connections with a policy.
//
// A connection is stale if its translation contradicts the policy's verdict for a
// new one from the same source to the same destination, after DNAT: the
// destination sees an address other than the source's although the policy exempts
// the connection, or the source's own although the policy masquerades it. The
// latter includes connections that were opened before there was any NAT chain:
// NAT applies once, at their first packet. So is one that left from an address
// that snatAddresses and snatRules do not allow, such as one that the node no longer has.
//
// These are never stale, because they are not evidence of another policy:
//   - connections from or to the node itself, and to multicast;
//   - connections whose verdict depends on the interfaces;
//   - TCP and SCTP connections that are closed;
//   - connections that a current rule of another program may have affected, by a
//     translation or an exemption: the entry does not show which rule did. A rule for
//     packets marked by kube-proxy or portmap only matters if the destination was
//     translated;
//   - connections from an address to itself, when a Service sends a pod back to
//     itself: they work only if they are translated;
//   - connections that a helper expected, which it translates like their first one;
//   - connections in a zone other than 0: Open vSwitch and tc track and translate
//     connections there themselves;
//   - connections that a bridge may have forwarded: nf_conntrack_bridge tracks them, and
//     they pass no chain that translates.
type Judge struct {
	Beside
	families map[bool]judged // those of the policy, by whether it is IPv6
	local    []iprange.Range
	received []iprange.Range
}

// Beside is what a judge must know of the node, besides the policy.
type Beside struct {
	Local []netip.Prefix // the node's own addresses
	// Delivered are also those of broadcast and anycast, of which the node receives packets.
	Delivered []netip.Prefix
	// Others reports whether something else than our policy may have set the source of
	// connections between two addresses, the destination after DNAT: another program, or a
	// bridge that has both ends.
	Others func(src, dst netip.Addr, dnat bool) bool
	// Spared are reasons, for people, why no connections of a family are certain to be stale.
	Spared []string
}

// A judged is the policy of a family.
type judged struct {
	masqueraded judge.Region // on any interface
	depends     bool         // on the interfaces
	policy      nft.FamilyPolicy
}

// NewJudge returns a judge for a policy.
func NewJudge(p nft.Policy, e Beside) *Judge {
	j := &Judge{Beside: e, families: map[bool]judged{}, local: iprange.SetOf(e.Local)}
	j.received = iprange.SetOf(append(slices.Clip(e.Delivered), netip.MustParsePrefix("255.255.255.255/32")))
	for _, f := range p.Families {
		wide, depends := judge.Masqueraded(f).OnAnyInterface()
		j.families[f.IPv6] = judged{wide, depends, f}
	}
	return j
}

// Now returns the verdict for a new connection from the same source to the same
// destination, or "" if it depends on the interfaces, which an entry does not
// contain.
func (j *Judge) Now(e *Entry) nft.Verdict {
	dst := e.Destination().Addr()
	src := e.Original.Src.Addr()
	f, on := j.families[dst.Is6()]
	switch c := (nft.Connection{Src: src, Dst: dst, FromNode: j.isLocal(src)}); {
	case on && j.isLocal(dst):
		return nft.Local
	case !f.masqueraded.Includes(c):
		return nft.Exempt
	case f.depends:
		return ""
	}
	return nft.Masqueraded
}

// Stale reports whether the entry's translation contradicts the policy.
func (j *Judge) Stale(e *Entry) bool {
	src, dst, seen := e.Original.Src.Addr(), e.Destination().Addr(), e.SeenAs().Addr()
	switch now, f := j.Now(e), j.families[dst.Is6()]; {
	case e.Zone != 0, e.Status&Expected != 0, !j.Forwarded(e):
		return false
	case now == nft.Exempt && seen == src, now == nft.Masqueraded && seen != src &&
		judge.AllowsSource(f.policy, src, dst, seen, j.isLocal(seen)), now == "":
		return false
	}
	return !j.Others(src, dst, e.Original.Dst != e.Destination())
}

// Forwarded reports whether a connection is open, and is not from or to the node
// itself, to multicast, or from an address to itself.
func (j *Judge) Forwarded(e *Entry) bool {
	src, dst := e.Original.Src.Addr(), e.Destination().Addr()
	return e.open() && src != dst && !dst.IsMulticast() && !j.isLocal(src) && !j.isLocal(dst) &&
		!iprange.Contains(j.received, dst)
}

func (j *Judge) isLocal(a netip.Addr) bool { return iprange.Contains(j.local, a) }

// open reports whether further packets of the connection are expected.
func (e *Entry) open() bool {
	switch e.State {
	case "TIME_WAIT", "CLOSE":
		return false
	case "CLOSED": // of SCTP: also before the reply to the first packet
		return e.Status&SeenReply == 0
	}
	return true
}

// sampleSize is the most entries examined in one dump.
const sampleSize = 200_000

// A Sample describes how much of a table was examined. The kernel's order is
// random, so the examined entries are representative.
type Sample struct {
	Examined int  // entries
	Entries  int  // in the table
	Partial  bool // there were more entries than were examined
}

// Sample is like [Tracker.Dump], but stops after 200,000 entries.
func (t *Tracker) Sample(start func() func(*Entry)) (Sample, error) {
	stats, err := t.Stats()
	if err != nil {
		return Sample{}, err
	}
	s := Sample{Entries: int(stats.Entries)}
	if s.Entries == 0 {
		start()
		return s, nil // to find that out, a dump walks the table of all namespaces
	}
	var visit func(*Entry)
	err = t.Dump(context.Background(), Filter{}, func() {
		s.Examined = 0
		visit = start()
	}, func(e *Entry) error {
		visit(e)
		if s.Examined++; s.Examined < t.sample {
			return nil
		}
		s.Partial = s.Entries > s.Examined
		return errStop
	})
	return s, err
}

// Stale counts stale connections.
type Stale struct {
	Count  int       // an estimate if only a part of the table was examined
	Oldest time.Time // zero if not known
	Sample
}

// CountStale counts the connections whose translation contradicts the policy. Each one that is
// examined is also passed to the functions that begin, if any, return.
func (t *Tracker) CountStale(j *Judge, begin ...func() func(*Entry)) (Stale, error) {
	var s Stale
	sample, err := t.Sample(func() func(*Entry) {
		s = Stale{}
		also := make([]func(*Entry), len(begin))
		for i, one := range begin {
			also[i] = one()
		}
		return func(e *Entry) {
			for _, visit := range also {
				visit(e)
			}
			if !j.Stale(e) {
				return
			}
			s.Count++
			if began := e.Started; !began.IsZero() && (s.Oldest.IsZero() || began.Before(s.Oldest)) {
				s.Oldest = began
			}
		}
	})
	if s.Sample = sample; s.Partial {
		s.Count = int(int64(s.Count) * int64(s.Entries) / int64(s.Examined))
	}
	return s, err
}
