package conntrack

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// An Unanswered is a destination from which no replies come, or with [Evidence.SilentUplinks] a family.
type Unanswered struct {
	Entry judge.Entry `json:"entry,omitzero"`
	// To is the destination.
	To netip.Addr `json:"to,omitzero"`
	// Answered and Silent count the connections to it: those with a reply, and those without one,
	// though older than ten seconds.
	Answered int `json:"answered"`
	Silent   int `json:"silent"`
}

// String returns the destination, and how many of the connections have a reply.
func (u Unanswered) String() string {
	return fmt.Sprintf("%s %d/%d", u.To, u.Answered, u.Answered+u.Silent)
}

// silentAfter is for how many seconds a connection has no reply before it counts as silent.
const silentAfter = 10

// A destination is silent if at least five connections to it can be judged, and nine of ten are silent.
const (
	fewestSilent = 5
	silentShare  = 0.9
)

func (u Unanswered) silent() bool {
	total := u.Answered + u.Silent
	return total >= fewestSilent && float64(u.Silent) >= silentShare*float64(total)
}

// replies counts which destinations answer.
type replies struct {
	timeouts map[uint8]uint32
	// answering are the UDP ports on which any connection was answered.
	answering    [1 << 16]bool
	destinations map[destination]Unanswered
	uplinks      [2]uplink
	full         bool
}

// A destination is an address, and of UDP a port.
type destination struct {
	address netip.Addr
	udp     bool
	port    uint16
}

// An uplink is what is masqueraded of a family.
type uplink struct {
	Unanswered
	quiet []netip.Addr // silent destinations, up to fewestDestinations
}

// fewestDestinations is how many destinations must be silent before the uplink is.
const fewestDestinations = 3

// maxDestinations bounds the memory.
const maxDestinations = 1 << 14

func newReplies(timeouts map[uint8]uint32) *replies {
	return &replies{timeouts: timeouts, destinations: map[destination]Unanswered{}}
}

// see counts an entry. Connections of which a translation hides who answers are left out: those that
// contradict the policy.
func (r *replies) see(e *Entry, entry judge.Entry, found Finding) {
	answered := e.Status&SeenReply != 0
	udp := e.Original.Protocol == unix.IPPROTO_UDP
	if answered && udp {
		r.answering[e.Destination().Port()] = true
	}
	if found != Agrees || !answered && !r.isSilent(e) {
		return
	}
	if entry.Verdict == nft.Masqueraded {
		if !udp || answered {
			r.uplinks[index(entry.IPv6)].see(e, answered)
		}
		return
	}
	target := destination{address: e.Destination().Addr(), udp: udp}
	if udp {
		target.port = e.Destination().Port()
	}
	u, known := r.destinations[target]
	if !known && len(r.destinations) >= maxDestinations {
		r.full = true
		return
	}
	u.Entry = entry
	u.count(answered)
	r.destinations[target] = u
}

func (u *Unanswered) count(answered bool) {
	if answered {
		u.Answered++
	} else {
		u.Silent++
	}
}

func (u *uplink) see(e *Entry, answered bool) {
	u.count(answered)
	dst := e.Destination().Addr()
	if !answered && len(u.quiet) < fewestDestinations && !slices.Contains(u.quiet, dst) {
		u.quiet = append(u.quiet, dst)
	}
}

// isSilent reports whether an entry without a reply is older than ten seconds: by the time that it
// began, or because it had no packet for that long.
func (r *replies) isSilent(e *Entry) bool {
	if e.Original.Protocol == unix.IPPROTO_TCP && e.State != "SYN_SENT" {
		return false
	}
	if !e.Started.IsZero() {
		return time.Since(e.Started) > silentAfter*time.Second
	}
	return e.Timeout+silentAfter < r.timeouts[e.Original.Protocol]
}

// unanswered returns the destinations that do not answer, and the families whose uplinks are silent.
func (r *replies) unanswered() (destinations, uplinks []Unanswered) {
	for i, u := range r.uplinks {
		if len(u.quiet) == fewestDestinations && u.silent() {
			u.Entry = judge.Entry{IPv6: i == 1, Verdict: nft.Masqueraded}
			uplinks = append(uplinks, u.Unanswered)
		}
	}
	byAddress := map[netip.Addr]Unanswered{}
	for target, u := range r.destinations {
		if target.udp && !r.expectsAnswers(target.port) {
			u.Silent = 0
		}
		sum := byAddress[target.address]
		sum.Entry = u.Entry
		sum.To = target.address
		sum.Answered += u.Answered
		sum.Silent += u.Silent
		byAddress[target.address] = sum
	}
	for _, u := range byAddress {
		hidden := slices.ContainsFunc(uplinks, func(silent Unanswered) bool { return silent.Entry.IPv6 == u.Entry.IPv6 })
		if u.silent() && !hidden {
			destinations = append(destinations, u)
		}
	}
	slices.SortFunc(destinations, func(a, b Unanswered) int {
		if n := b.Silent - a.Silent; n != 0 {
			return n
		}
		return a.To.Compare(b.To)
	})
	return destinations, uplinks
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

// Text says what was seen of a destination that does not answer, and what to do about it.
func (u Unanswered) Text() string {
	host := netip.PrefixFrom(u.To, u.To.BitLen())
	return fmt.Sprintf("%s answered %d of %d connections that show the pod's IP: force %s (forceMasqueradeCIDRs), or "+
		"check the way back; a host that is down looks the same", u.To, u.Answered, u.Answered+u.Silent, host)
}

// UplinkText says what was seen of an uplink of [Evidence.SilentUplinks].
func (u Unanswered) UplinkText() string {
	return fmt.Sprintf("%d of %d masqueraded connections of %s were answered: check the uplink of this node, "+
		"its next hop and the way back", u.Answered, u.Answered+u.Silent, FamilyName(u.Entry.IPv6))
}
