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
	answering [1 << 16]bool
	// exempt and masqueraded are the destinations by address and UDP port, 0 for other protocols.
	exempt, masqueraded map[netip.AddrPort]Unanswered
	full                bool
}

// fewestDestinations is how many destinations must have a silent connection before the uplink is silent.
const fewestDestinations = 3

// maxDestinations bounds the memory.
const maxDestinations = 1 << 14

func newReplies(timeouts []Timeout) *replies {
	return &replies{
		timeouts: timeouts, exempt: map[netip.AddrPort]Unanswered{}, masqueraded: map[netip.AddrPort]Unanswered{},
	}
}

// see counts an entry, if it agrees with the policy: of others, a translation may hide who answers.
func (r *replies) see(e *Entry, entry judge.Entry, found Finding) {
	// A SYN+ACK may have been dropped behind connection tracking, such as by a strict reverse path filter.
	answered := e.Status&SeenReply != 0 && e.State != "SYN_RECV"
	port := uint16(0)
	if e.Original.Protocol == unix.IPPROTO_UDP {
		port = e.Destination().Port()
		r.answering[port] = r.answering[port] || answered
	}
	opening := e.State == "" || e.State == "SYN_SENT" || e.State == "SYN_RECV"
	if found != Agrees || !answered && (!opening || !r.isSilent(e)) {
		return
	}
	destinations := r.exempt
	if entry.Verdict == nft.Masqueraded {
		destinations = r.masqueraded
	}
	target := netip.AddrPortFrom(e.Destination().Addr(), port)
	u, known := destinations[target]
	if !known && len(destinations) >= maxDestinations {
		r.full = true
		return
	}
	u.Entry = entry
	u.To = target.Addr()
	if answered {
		u.Answered++
	} else {
		u.Silent++
	}
	destinations[target] = u
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
	var silentUplink [2]bool
	for i := range silentUplink {
		uplink := Unanswered{Entry: judge.Entry{IPv6: i == 1, Verdict: nft.Masqueraded}}
		silent := 0
		for _, u := range r.byAddress(r.masqueraded) {
			if u.Entry.IPv6 != uplink.Entry.IPv6 {
				continue
			}
			uplink.Answered += u.Answered
			uplink.Silent += u.Silent
			if u.Silent > 0 {
				silent++
			}
		}
		if silent >= fewestDestinations && uplink.silent() {
			silentUplink[i] = true
			list = append(list, uplink)
		}
	}
	for _, u := range r.byAddress(r.exempt) {
		if u.silent() && !silentUplink[index(u.Entry.IPv6)] {
			list = append(list, u)
		}
	}
	slices.SortStableFunc(list, func(a, b Unanswered) int {
		return cmp.Or(a.To.BitLen()-b.To.BitLen(), b.Silent-a.Silent, a.To.Compare(b.To))
	})
	return list
}

// byAddress sums up destinations. Connections to UDP ports that expect no answers do not count as silent.
func (r *replies) byAddress(destinations map[netip.AddrPort]Unanswered) map[netip.Addr]Unanswered {
	sums := map[netip.Addr]Unanswered{}
	for target, u := range destinations {
		if target.Port() != 0 && !r.expectsAnswers(target.Port()) {
			u.Silent = 0
		}
		sum := sums[target.Addr()]
		u.Answered += sum.Answered
		u.Silent += sum.Silent
		sums[target.Addr()] = u
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
