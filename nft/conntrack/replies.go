package conntrack

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// An Unanswered is a destination from which no replies come, or the uplink of a family.
type Unanswered struct {
	Entry judge.Entry
	// To is the destination, the zero address for the uplink.
	To netip.Addr
	// Answered and Silent count the connections to it: those with a reply, and those without one,
	// though older than ten seconds.
	Answered, Silent int
}

// String says what was seen.
func (u Unanswered) String() string {
	total := u.Answered + u.Silent
	if u.To.IsValid() {
		return fmt.Sprintf("%s answered %d of %d connections that show the pod's IP", u.To, u.Answered, total)
	}
	return fmt.Sprintf("%d of %d masqueraded %s connections were answered", u.Answered, total,
		nft.FamilyName(u.Entry.IPv6))
}

// Remedy says what to do about it.
func (u Unanswered) Remedy() string {
	if u.To.IsValid() {
		return fmt.Sprintf("force %s (%s), or check the way back to the pods; a host that is down looks the same",
			netip.PrefixFrom(u.To, u.To.BitLen()), config.KeyForceMasqueradeCIDRs)
	}
	return "check the uplink of this node: its next hop, its address, the way back, and firewalls"
}

// synReceived is for how many seconds a connection is kept after a SYN+ACK, unless that is configured otherwise.
const synReceived = 60

// silentAfter is for how many seconds a connection has no reply before it counts as silent.
const silentAfter = 10

// A destination is silent if at least five connections to it can be judged, and nine of ten are silent.
const (
	fewestJudged = 5
	silentShare  = 0.9
)

func (u Unanswered) silent() bool {
	total := u.Answered + u.Silent
	return total >= fewestJudged && float64(u.Silent) >= silentShare*float64(total)
}

// replies counts which destinations answer.
type replies struct {
	timeouts []Timeout
	// answering are the UDP ports on which any connection was answered.
	answering    [1 << 16]bool
	destinations map[destination]Unanswered
	full         bool
}

// A destination is one of connections with a verdict. The port is that of UDP, 0 for other protocols.
type destination struct {
	verdict nft.Verdict
	target  netip.AddrPort
}

// fewestDestinations is how many destinations must have a silent connection before the uplink is silent.
const fewestDestinations = 3

// maxDestinations bounds the memory.
const maxDestinations = 1 << 15

func newReplies(timeouts []Timeout) *replies {
	return &replies{timeouts: timeouts, destinations: map[destination]Unanswered{}}
}

// see counts an entry, if it agrees with the policy or is closed: of others, a translation may hide who answers.
func (r *replies) see(e *Entry, entry judge.Entry, found Finding) {
	// A SYN+ACK may have been dropped behind connection tracking, such as by a strict reverse path filter.
	answered := e.Status&SeenReply != 0 && e.State != "SYN_RECV"
	port := uint16(0)
	if e.Original.Protocol == unix.IPPROTO_UDP {
		port = e.Destination().Port()
		r.answering[port] = r.answering[port] || answered
	}
	opening := e.State == "" || e.State == "SYN_SENT" || e.State == "SYN_RECV"
	if found != Agrees && found != Closed || !answered && (!opening || !r.isSilent(e)) {
		return
	}
	d := destination{entry.Verdict, netip.AddrPortFrom(e.Destination().Addr(), port)}
	u, known := r.destinations[d]
	if !known && len(r.destinations) >= maxDestinations {
		r.full = true
		return
	}
	u.Entry = entry
	u.To = d.target.Addr()
	if answered {
		u.Answered++
	} else {
		u.Silent++
	}
	r.destinations[d] = u
}

// isSilent reports whether an entry without a reply is older than ten seconds: by the time that it
// began, or because it had no packet for that long.
func (r *replies) isSilent(e *Entry) bool {
	if !e.Started.IsZero() {
		return time.Since(e.Started) > silentAfter*time.Second
	}
	if e.State == "SYN_RECV" {
		return e.Timeout+silentAfter < synReceived
	}
	for _, t := range r.timeouts {
		if t.Protocol == e.Original.Protocol {
			return e.Timeout+silentAfter < t.Seconds
		}
	}
	return false
}

// unanswered returns the families whose uplinks are silent, and the destinations of others that do not answer.
func (r *replies) unanswered() (list []Unanswered) {
	sums := r.byAddress()
	silentUplink := map[bool]bool{} // by IPv6
	for _, ipv6 := range []bool{false, true} {
		uplink := Unanswered{Entry: judge.Entry{IPv6: ipv6, Verdict: nft.Masqueraded}}
		silent := 0
		for _, u := range sums {
			if u.Entry.Verdict != nft.Masqueraded || u.Entry.IPv6 != ipv6 {
				continue
			}
			uplink.Answered += u.Answered
			uplink.Silent += u.Silent
			if u.Silent > 0 {
				silent++
			}
		}
		if silent >= fewestDestinations && uplink.silent() {
			silentUplink[ipv6] = true
			list = append(list, uplink)
		}
	}
	for _, u := range sums {
		if u.Entry.Verdict == nft.Exempt && u.silent() && !silentUplink[u.Entry.IPv6] {
			list = append(list, u)
		}
	}
	slices.SortStableFunc(list, func(a, b Unanswered) int {
		return cmp.Or(a.To.BitLen()-b.To.BitLen(), b.Silent-a.Silent, a.To.Compare(b.To))
	})
	return list
}

// byAddress sums up the destinations of each address, without the silent ones of UDP ports that expect no answers.
func (r *replies) byAddress() map[destination]Unanswered {
	sums := map[destination]Unanswered{}
	for d, u := range r.destinations {
		if d.target.Port() != 0 && !r.expectsAnswers(d.target.Port()) {
			u.Silent = 0
		}
		address := destination{d.verdict, netip.AddrPortFrom(u.To, 0)}
		sum := sums[address]
		u.Answered += sum.Answered
		u.Silent += sum.Silent
		sums[address] = u
	}
	return sums
}

// expectsAnswers reports whether what is sent to a UDP port is a request: somebody on this node got an
// answer on it, or it is that of DNS, NTP or QUIC. Those of syslog and statsd never answer. What it
// misses: a protocol of which the only destination is the silent one.
func (r *replies) expectsAnswers(port uint16) bool {
	switch port {
	case 53, 123, 443:
		return true
	}
	return r.answering[port]
}
