package judge

import (
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Step is one question of a policy and its answer for a connection.
type Step struct {
	Condition nft.Question // the condition; zero for questions of every policy
	Question  string       // in words
	Yes       bool         // the answer
	CIDR      config.CIDR  // the entry that contains the address, if any; or only a position
	Name      string       // the entry that matches the interface, if any
	Decides   bool
	Verdict   nft.Verdict // if it decides
}

// Explain returns the questions of the policy for a connection, in order, up to
// the one that applies.
func Explain(p nft.Policy, c nft.Connection) []Step {
	c.Src = c.Src.Unmap()
	c.Dst = c.Dst.Unmap()
	if c.FromNode {
		c.InInterface = ""
	}
	if f, enabled := p.Family(c.Dst.Is6()); enabled {
		return explain(f, c)
	}
	return []Step{{Question: "IPv6 is disabled (set enableIPv6 or --enable-ipv6)", Yes: true, Decides: true, Verdict: nft.Exempt}}
}

func explain(f nft.FamilyPolicy, c nft.Connection) []Step {
	steps := []Step{{Question: "to an address of this node", Yes: c.ToNode, Decides: c.ToNode, Verdict: nft.Local}}
	if c.ToNode {
		return steps
	}
	for i := range f.Questions {
		step := newStep(&f.Questions[i], c)
		steps = append(steps, step)
		if step.Decides {
			return steps
		}
	}
	return append(steps, Step{Question: "anything else", Yes: true, Decides: true, Verdict: nft.Masqueraded})
}

func newStep(q *nft.Question, c nft.Connection) Step {
	_, matches := ask(q, c)
	step := Step{Condition: *q, Question: q.Question(), Yes: matches, Decides: matches != q.Outside, Verdict: nft.Exempt}
	if q.Masquerade {
		step.Verdict = nft.Masqueraded
	}
	var entry config.Interface
	switch q.Asks {
	case config.SentByNode:
		step.CIDR.Pos = q.Pos
	case config.SourceAddress:
		step.CIDR, _ = q.Find(c.Src)
	case config.DestinationAddress:
		step.CIDR, _ = q.Find(c.Dst)
	case config.ReceivedOn:
		entry, _ = matching(q, c.InInterface)
	case config.LeavingBy:
		entry, _ = matching(q, c.OutInterface)
	}
	if entry.Name != "" {
		step.Name = entry.Name
		step.CIDR.Pos = entry.Pos
	}
	return step
}

// Enforced reports whether a connection keeps its address whatever other programs do
// in chains after [nft.EnforcePriority]. One of a pod to itself, through a Service or a host
// port, does not: with its own address as source it would not work.
func Enforced(p nft.Policy, c nft.Connection) bool {
	f, enabled := p.Family(c.Dst.Is6())
	if !enabled || !p.Enforces(f) || c.Src == c.Dst || !IsPod(f, c) {
		return false
	}
	steps := explain(f, c)
	return steps[len(steps)-1].Verdict == nft.Exempt
}
