package conntrack

import (
	"fmt"
	"net/netip"
	"net/url"
	"strconv"
)

// A Question asks for the connections from a source, if it is valid, to a destination, after or before
// DNAT. Protocol and port are not asked if they are 0.
type Question struct {
	From     netip.Addr
	To       netip.AddrPort
	Protocol uint8
}

// Query returns questions as the query of a URL, for [ParseQuestions].
func Query(questions []Question) url.Values {
	v := url.Values{}
	for _, q := range questions {
		v.Add("to", q.To.String())
		v.Add("from", addressText(q.From))
		v.Add("protocol", strconv.Itoa(int(q.Protocol)))
	}
	return v
}

func addressText(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// maxQuestions is how many questions one pass answers.
const maxQuestions = 16

// ParseQuestions returns the questions of [Query].
func ParseQuestions(v url.Values) ([]Question, error) {
	n := len(v["to"])
	if len(v["from"]) != n || len(v["protocol"]) != n || n > maxQuestions {
		return nil, fmt.Errorf("questions: need to, from and protocol for each, and at most %d", maxQuestions)
	}
	all := make([]Question, n)
	for i := range all {
		to, err := netip.ParseAddrPort(v["to"][i])
		if err != nil {
			return nil, fmt.Errorf("questions: to: %w", err)
		}
		all[i].To = to
		if from := v["from"][i]; from != "" {
			if all[i].From, err = netip.ParseAddr(from); err != nil {
				return nil, fmt.Errorf("questions: from: %w", err)
			}
		}
		protocol, err := strconv.ParseUint(v["protocol"][i], 10, 8)
		if err != nil {
			return nil, fmt.Errorf("questions: protocol: %w", err)
		}
		all[i].Protocol = uint8(protocol)
	}
	return all, nil
}

func (q Question) matches(e *Entry) bool {
	of := func(dst netip.AddrPort) bool {
		return dst.Addr() == q.To.Addr() && (q.To.Port() == 0 || dst.Port() == q.To.Port())
	}
	return (!q.From.IsValid() || e.Original.Src.Addr() == q.From) &&
		(q.Protocol == 0 || e.Original.Protocol == q.Protocol) && (of(e.Destination()) || of(e.Original.Dst))
}
