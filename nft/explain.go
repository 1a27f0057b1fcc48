package nft

import (
	"net/netip"

	"nft-masq-agent/config"
)

// Verdict is what becomes of a new connection.
type Verdict string

// The verdicts, by the names of the counters.
const (
	Local       Verdict = "local"       // to an address of this node: never masqueraded
	Exempt      Verdict = "exempt"      // keeps its source address, as far as we are asked
	Masqueraded Verdict = "masqueraded" // gets the node's address
)

// A Connection is what a policy is asked about: the addresses of a connection's
// first packet as it leaves, whether they are addresses of this node, and the names
// of the interfaces it is received on and leaves by. What the node itself sends was
// received on none.
type Connection struct {
	Src, Dst         netip.Addr
	FromNode, ToNode bool
	In, Out          string
}

// A Step is one question of the policy and its answer for a connection.
type Step struct {
	Key      string      // of the condition; none: a question of every policy
	Question string      // in words
	Yes      bool        // the answer
	CIDR     config.CIDR // the entry that holds the address, if one does; or just a place
	Name     string      // the entry that matches the interface, if one does
	Decides  bool
	Verdict  Verdict // where it decides
}

// Explain returns the questions that the policy asks about a connection, in order,
// up to the one that decides.
func (p Policy) Explain(c Connection) []Step {
	c.Src, c.Dst = c.Src.Unmap(), c.Dst.Unmap()
	if c.FromNode {
		c.In = ""
	}
	for _, f := range p.Families {
		if f.IPv6 == c.Dst.Is6() {
			return f.explain(c)
		}
	}
	return []Step{{Question: "IPv6 is disabled (set enableIPv6)", Yes: true, Decides: true, Verdict: Exempt}}
}

func (f FamilyPolicy) explain(c Connection) []Step {
	steps := []Step{{Question: "to an address of this node", Yes: c.ToNode, Decides: c.ToNode, Verdict: Local}}
	if c.ToNode {
		return steps
	}
	for _, q := range f.Questions {
		entry, name, yes := q.answer(c)
		step := Step{Key: q.Key, Question: q.Question(), Yes: yes, CIDR: entry, Name: name, Decides: yes != q.Outside, Verdict: Exempt}
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

// answer also returns the entry that holds the address, or its place and the name
// that matches the interface.
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
	default:
		entry, yes = q.find(c.Dst)
	}
	return entry, "", yes
}

func (q Question) matching(name string) (config.CIDR, string, bool) {
	for _, i := range q.Interfaces {
		if name != "" && i.Matches(name) {
			return config.CIDR{Pos: i.Pos}, i.Name, true
		}
	}
	return config.CIDR{}, "", false
}

// Decide returns the verdict alone.
func (p Policy) Decide(c Connection) Verdict {
	steps := p.Explain(c)
	return steps[len(steps)-1].Verdict
}
