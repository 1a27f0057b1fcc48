package conntrack

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
)

// A Question asks for the connections from a source, if it is valid, to a destination, after or before
// DNAT. Protocol and port are not asked if they are 0.
type Question struct {
	From     netip.Addr     `json:"from"`
	To       netip.AddrPort `json:"to"`
	Protocol uint8          `json:"protocol"`
}

// Query returns questions as the query of a URL, for [ParseQuestions].
func Query(questions []Question) url.Values {
	text, _ := json.Marshal(questions) // it cannot fail
	return url.Values{"questions": {string(text)}}
}

// maxQuestions is how many questions one pass answers.
const maxQuestions = 16

// ParseQuestions returns the questions of [Query]. There may be none.
func ParseQuestions(v url.Values) (questions []Question, err error) {
	text := v.Get("questions")
	if text == "" {
		return nil, nil
	}
	err = json.Unmarshal([]byte(text), &questions)
	if err != nil {
		return nil, fmt.Errorf("questions: %w", err)
	}
	if len(questions) > maxQuestions {
		return nil, fmt.Errorf("questions: %d, more than %d", len(questions), maxQuestions)
	}
	return questions, nil
}

func (q Question) matches(e *Entry) bool {
	if q.From.IsValid() && e.Original.Src.Addr() != q.From || q.Protocol != 0 && e.Original.Protocol != q.Protocol {
		return false
	}
	return q.isTo(e.Destination()) || q.isTo(e.Original.Dst)
}

func (q Question) isTo(dst netip.AddrPort) bool {
	return dst.Addr() == q.To.Addr() && (q.To.Port() == 0 || dst.Port() == q.To.Port())
}
