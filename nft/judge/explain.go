package judge

import (
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Step is one condition of a policy and its answer for a connection.
type Step struct {
	Condition nft.Condition // the condition; zero for those of every policy
	Question  string        // in words
	Yes       bool          // the answer
	CIDR      config.CIDR   // the entry that contains the address, if any; or only a position
	Name      string        // the entry that matches the interface, if any
}

// Explain returns the conditions of the policy for a connection, in order, up to the one that decides, and the verdict.
func Explain(p nft.Policy, c nft.Connection) ([]Step, nft.Verdict) {
	c.Src = c.Src.Unmap()
	c.Dst = c.Dst.Unmap()
	f, enabled := p.Family(c.Dst.Is6())
	if !enabled {
		return []Step{{Question: "IPv6 is disabled (set enableIPv6 or --enable-ipv6)", Yes: true}}, nft.Exempt
	}
	steps := []Step{{Question: "to an address of this node", Yes: c.ToNode}}
	if c.ToNode {
		return steps, nft.Local
	}
	for i := range f.Conditions {
		condition := &f.Conditions[i]
		step := newStep(condition, c)
		steps = append(steps, step)
		if step.Yes != condition.Outside {
			return steps, verdict(condition)
		}
	}
	return append(steps, Step{Question: "anything else", Yes: true}), nft.Masqueraded
}

// Place returns where a file has the entry that matches, or the list without one.
func (s Step) Place() config.Position {
	switch {
	case s.Yes:
		return s.CIDR.Pos
	case len(s.Condition.CIDRs) > 0:
		return s.Condition.CIDRs[0].Pos
	case len(s.Condition.Interfaces) > 0:
		return s.Condition.Interfaces[0].Pos
	}
	return s.Condition.Pos
}

func newStep(condition *nft.Condition, c nft.Connection) Step {
	m := ask(condition, c)
	step := Step{Condition: *condition, Question: condition.Question(), Yes: m.yes, Name: m.link.Name}
	step.CIDR.Pos = condition.Pos
	if m.link.Name != "" {
		step.CIDR.Pos = m.link.Pos
	}
	if m.cidr.IsValid() {
		step.CIDR, _ = condition.Find(m.cidr.Addr())
	}
	return step
}

// Enforced reports whether a connection keeps its address whatever other programs do
// in chains after [nft.EnforcePriority]. One of a pod to itself, through a Service or a host
// port, does not: with its own address as source it would not work.
func Enforced(p nft.Policy, c nft.Connection) bool {
	f, _ := p.Family(c.Dst.Is6()) // one that is off enforces nothing
	if !p.Enforces(f) || c.Src == c.Dst || !IsPod(f, c) {
		return false
	}
	_, verdict := Explain(p, c)
	return verdict == nft.Exempt
}
