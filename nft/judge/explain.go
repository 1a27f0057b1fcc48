package judge

import (
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Step is one question of a policy and its answer for a connection.
type Step struct {
	Of       nft.Question // the condition; zero for questions of every policy
	Question string       // in words
	Yes      bool         // the answer
	CIDR     config.CIDR  // the entry that contains the address, if any; or only a position
	Name     string       // the entry that matches the interface, if any
	Decides  bool
	Verdict  nft.Verdict // if it decides
}

// Explain returns the questions of the policy for a connection, in order, up to
// the one that applies.
func Explain(p nft.Policy, c nft.Connection) []Step {
	c.Src, c.Dst = c.Src.Unmap(), c.Dst.Unmap()
	if c.FromNode {
		c.In = ""
	}
	if f, on := p.Family(c.Dst.Is6()); on {
		return explain(f, c)
	}
	return []Step{{Question: "IPv6 is disabled (set enableIPv6)", Yes: true, Decides: true, Verdict: nft.Exempt}}
}

func explain(f nft.FamilyPolicy, c nft.Connection) []Step {
	steps := []Step{{Question: "to an address of this node", Yes: c.ToNode, Decides: c.ToNode, Verdict: nft.Local}}
	if c.ToNode {
		return steps
	}
	for _, q := range f.Questions {
		entry, name, yes := answer(q, c)
		step := Step{
			Of: q, Question: q.Question(), Yes: yes, CIDR: entry, Name: name, Decides: yes != q.Outside,
			Verdict: nft.Exempt,
		}
		if q.Masquerade {
			step.Verdict = nft.Masqueraded
		}
		steps = append(steps, step)
		if step.Decides {
			return steps
		}
	}
	return append(steps, Step{Question: "anything else", Yes: true, Decides: true, Verdict: nft.Masqueraded})
}

// answer returns whether the question matches, with the entry that contains the
// address, or the position and name of the entry that matches the interface.
func answer(q nft.Question, c nft.Connection) (entry config.CIDR, name string, yes bool) {
	switch q.Asks {
	case config.SentByNode:
		return config.CIDR{Pos: q.At}, "", c.FromNode
	case config.ReceivedOn:
		return matching(q, c.In)
	case config.LeavingBy:
		return matching(q, c.Out)
	case config.SourceAddress:
		entry, yes = q.Find(c.Src)
	case config.DestinationAddress:
		entry, yes = q.Find(c.Dst)
	default:
		q.Unknown()
	}
	return entry, "", yes
}

func matching(q nft.Question, name string) (config.CIDR, string, bool) {
	for _, i := range q.Interfaces {
		if name != "" && i.Matches(name) {
			return config.CIDR{Pos: i.Pos}, i.Name, true
		}
	}
	return config.CIDR{}, "", false
}

// Decide returns only the verdict.
func Decide(p nft.Policy, c nft.Connection) nft.Verdict {
	steps := Explain(p, c)
	return steps[len(steps)-1].Verdict
}

// Enforced reports whether a connection keeps its address whatever other programs do
// in chains after [nft.EnforcePriority]. One of a pod to itself, through a Service or a host
// port, does not: with its own address as source it would not work.
func Enforced(p nft.Policy, c nft.Connection) bool {
	f, on := p.Family(c.Dst.Unmap().Is6())
	return on && p.Enforces(f) && c.Src != c.Dst && Pods(f).Includes(c) && !Masqueraded(f).Includes(c)
}
