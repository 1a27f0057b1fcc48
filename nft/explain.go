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
// first packet as it leaves, and whether they are addresses of this node.
type Connection struct {
	Src, Dst         netip.Addr
	FromNode, ToNode bool
}

// A Step is one question of the policy and its answer for a connection.
type Step struct {
	Key      string      // of the condition; none: a question of every policy
	Question string      // in words
	Yes      bool        // the answer
	CIDR     config.CIDR // the entry that holds the address, if one does; or just a place
	Decides  bool
	Verdict  Verdict // where it decides
}

// Explain returns the questions that the policy asks about a connection, in order,
// up to the one that decides.
func (p Policy) Explain(c Connection) []Step {
	c.Src, c.Dst = c.Src.Unmap(), c.Dst.Unmap()
	for _, f := range p.Families {
		if f.IPv6 == c.Dst.Is6() {
			return f.explain(c)
		}
	}
	return []Step{{Question: "IPv6, which is off", Yes: true, Decides: true, Verdict: Exempt}}
}

func (f FamilyPolicy) explain(c Connection) []Step {
	steps := []Step{{Question: "to an address of this node", Yes: c.ToNode, Decides: c.ToNode, Verdict: Local}}
	if c.ToNode {
		return steps
	}
	for _, q := range f.Questions {
		entry, yes := q.answer(c)
		step := Step{Key: q.Key, Question: q.Question(), Yes: yes, CIDR: entry, Decides: yes != q.Outside, Verdict: Exempt}
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

// answer also returns the entry that holds the address.
func (q Question) answer(c Connection) (config.CIDR, bool) {
	switch q.Asks {
	case config.SentByNode:
		return config.CIDR{Pos: q.At}, c.FromNode
	case config.SourceAddress:
		return q.find(c.Src)
	}
	return q.find(c.Dst)
}

// Decide returns the verdict alone.
func (p Policy) Decide(c Connection) Verdict {
	steps := p.Explain(c)
	return steps[len(steps)-1].Verdict
}
