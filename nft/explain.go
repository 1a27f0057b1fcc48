package nft

import (
	"net/netip"

	"nft-masq-agent/config"
)

// Verdict is the decision about a new connection.
type Verdict string

// The verdicts, named like the counters.
const (
	Local       Verdict = "local"       // to an address of this node: never masqueraded
	Exempt      Verdict = "exempt"      // not masqueraded by us
	Masqueraded Verdict = "masqueraded" // masqueraded as the node's address
)

// A Connection is what a policy gives a verdict about: the addresses of a connection's
// first packet as it leaves, whether they are addresses of this node, and the
// names of its input and output interface. The node's own traffic has no input
// interface.
type Connection struct {
	Src, Dst         netip.Addr
	FromNode, ToNode bool
	In, Out          string
}

// A Step is one question of a policy and its answer for a connection.
type Step struct {
	Key      string      // of the condition; empty for questions of every policy
	Question string      // in words
	Yes      bool        // the answer
	CIDR     config.CIDR // the entry that contains the address, if any; or only a position
	Name     string      // the entry that matches the interface, if any
	Decides  bool
	Verdict  Verdict // if it decides
}

// Explain returns the questions of the policy for a connection, in order, up to
// the one that applies.
func (p Policy) Explain(c Connection) []Step { return p.ExplainSources(c, nil) }

// ExplainSources is like Explain for all sources for which the conditions about the source
// and the input interface have these answers. Without a function, those of the connection
// answer them.
func (p Policy) ExplainSources(c Connection, answers func(Question) bool) []Step {
	c.Src, c.Dst = c.Src.Unmap(), c.Dst.Unmap()
	if c.FromNode {
		c.In = ""
	}
	if f, on := p.Family(c.Dst.Is6()); on {
		return f.explain(c, answers)
	}
	return []Step{{Question: "IPv6 is disabled (set enableIPv6)", Yes: true, Decides: true, Verdict: Exempt}}
}

func (f FamilyPolicy) explain(c Connection, answers func(Question) bool) []Step {
	steps := []Step{{Question: "to an address of this node", Yes: c.ToNode, Decides: c.ToNode, Verdict: Local}}
	if c.ToNode {
		return steps
	}
	for _, q := range f.Questions {
		entry, name, yes := q.answer(c)
		if answers != nil && q.AsksSource() {
			entry, name, yes = config.CIDR{}, "", answers(q)
		}
		step := Step{
			Key: q.Key, Question: q.Question(), Yes: yes, CIDR: entry, Name: name, Decides: yes != q.Outside,
			Verdict: Exempt,
		}
		if q.Masquerade {
			step.Verdict = Masqueraded
		}
		steps = append(steps, step)
		if step.Decides {
			return steps
		}
	}
	return append(steps, Step{Question: "anything else", Yes: true, Decides: true, Verdict: Masqueraded})
}

// AsksSource reports whether the question is about the source or the input interface.
func (q Question) AsksSource() bool {
	return q.Asks == config.SourceAddress || q.Asks == config.ReceivedOn
}

// answer returns whether the question matches, with the entry that contains the
// address, or the position and name of the entry that matches the interface.
func (q Question) answer(c Connection) (entry config.CIDR, name string, yes bool) {
	switch q.Asks {
	case config.SentByNode:
		return config.CIDR{Pos: q.At}, "", c.FromNode
	case config.ReceivedOn:
		return q.matching(c.In)
	case config.LeavingBy:
		return q.matching(c.Out)
	case config.SourceAddress:
		entry, yes = q.find(c.Src)
	case config.DestinationAddress:
		entry, yes = q.find(c.Dst)
	default:
		q.unknown()
	}
	return entry, "", yes
}

// unknown ends the program because of a condition about something that the caller does not know:
// no answer would be right, and tests ask about all conditions.
func (q Question) unknown() { panic("condition about " + string(q.Asks)) }

func (q Question) matching(name string) (config.CIDR, string, bool) {
	for _, i := range q.Interfaces {
		if name != "" && i.Matches(name) {
			return config.CIDR{Pos: i.Pos}, i.Name, true
		}
	}
	return config.CIDR{}, "", false
}

// Decide returns only the verdict.
func (p Policy) Decide(c Connection) Verdict {
	steps := p.Explain(c)
	return steps[len(steps)-1].Verdict
}
