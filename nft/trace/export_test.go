package trace

import (
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// Effect returns what is known of an expression that neither compares nor ends by a verdict.
func Effect(r nfnetlink.Rule) (Code, Truth) {
	for s := range rule.Statements(r) {
		e, is := new(Tracer).statement(&Chain{}, s)
		return e.code, is
	}
	return nothing, Maybe
}

// Near are the bounds of what is read, less so much.
type Near struct{ Rules, Memory, Elements int }

// TracerNear reads the chains of all hooks when only so much may be read.
func TracerNear(c *nfnetlink.Conn, left Near) (*Tracer, error) {
	r := &reader{Rules: &Rules{}, conn: c, Scope: Scope{
		Own:   func(nfnetlink.Chain) bool { return false },
		Reads: func(nfnetlink.Chain) bool { return true },
	}}
	r.rules, r.memory, r.elements = maxRules-left.Rules, maxMemory-left.Memory, maxElements-left.Elements
	err := r.read()
	return New(r.Rules), err
}

// Content returns how many chains and sets were read.
func (r *Rules) Content() (chains, sets int) {
	for _, c := range r.Chains {
		if c.Unread == 0 {
			chains++
		}
	}
	for _, s := range r.sets {
		if s.read {
			sets++
		}
	}
	return chains, sets
}
