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

// A Step is one question of the policy and its answer for a connection.
type Step struct {
	Question string      // in words
	Yes      bool        // the answer
	CIDR     config.CIDR // the entry that holds the address, if one does
	Decides  bool
	Verdict  Verdict // where it decides
}

// Explain asks the policy what becomes of a connection's first packet, and
// gives the questions in their order up to the one that decides. local says
// that dst is an address of this node.
func (p Policy) Explain(src, dst netip.Addr, local bool) []Step {
	src, dst = src.Unmap(), dst.Unmap()
	for _, f := range p.Families {
		if f.IPv6 == dst.Is6() {
			return f.explain(src, dst, local)
		}
	}
	return []Step{{Question: "IPv6, which is off", Yes: true, Decides: true, Verdict: Exempt}}
}

func (f FamilyPolicy) explain(src, dst netip.Addr, local bool) []Step {
	steps := []Step{{Question: "to an address of this node", Yes: local, Decides: local, Verdict: Local}}
	if local {
		return steps
	}
	for _, q := range f.Questions {
		addr := dst
		if q.Asks == config.SourceAddress {
			addr = src
		}
		cidr, in := q.find(addr)
		step := Step{Question: q.Question(), Yes: in, CIDR: cidr, Decides: in != q.Outside, Verdict: Exempt}
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

// Decide gives the verdict alone.
func (p Policy) Decide(src, dst netip.Addr, local bool) Verdict {
	steps := p.Explain(src, dst, local)
	return steps[len(steps)-1].Verdict
}
