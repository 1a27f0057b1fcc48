package kernel

import (
	"context"
	"slices"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A state is our rules in the kernel, and those of older agents, at one generation.
type state struct {
	generation uint32
	held       []layout.Held
	wanted     layout.Held           // of the wanted layout; nil: no rules are wanted
	legacy     []foreign.LegacyChain // if a takeover is requested
}

// read reads the kernel's state. What was verified before completes the scope. With
// the state of an earlier read, it reads only what can have changed since.
func (k *Kernel) read(ctx context.Context, want nft.Ruleset, l Look, scope layout.Scope, since *state) (*state, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s := &state{}
	others := l.Others || l.TakeOver
	var err error
	if s.generation, err = k.conn.Generation(); err != nil {
		return nil, err
	}
	scope.Full, scope.Quick, scope.Others, scope.Generation = l.Full, l.Quick, others, s.generation
	scope.Same, scope.Unchanged, scope.InFull = k.verified.want.Same(want), s.generation == k.verified.generation, k.verified.inFull
	for i, r := range k.readers {
		if since != nil && since.held != nil {
			scope.Since = since.held[i]
		}
		h, err := r.Read(ctx, want, scope)
		if err != nil {
			return nil, err
		}
		s.held = append(s.held, h)
		if r.Mode() == want.Mode() {
			s.wanted = h
		}
	}
	if l.TakeOver {
		snapshot, err := foreign.Read(ctx, k.conn, s.isOurs(want))
		if err != nil {
			return nil, err
		}
		s.legacy = foreign.Legacy(snapshot)
	}
	return s, nil
}

// unchanged reports whether a plan for an earlier state is still right. One that
// deletes rules of older agents is not: their handles are those of another moment.
func (s *state) unchanged(since *state) bool {
	if len(s.legacy)+len(since.legacy) > 0 {
		return false
	}
	for i, h := range s.held {
		if !h.Unchanged(since.held[i]) {
			return false
		}
	}
	return true
}

// inFull reports whether everything was read.
func (s *state) inFull() bool {
	return !slices.ContainsFunc(s.held, func(h layout.Held) bool { return !h.InFull() })
}

// differences describes how the state differs from the wanted one.
func (s *state) differences(want nft.Ruleset) (diffs []string) {
	for _, l := range s.legacy {
		diffs = append(diffs, "another agent's "+l.String())
	}
	diffs = append(diffs, s.wanted.Differences(want)...)
	for _, left := range s.leftovers(want) {
		diffs = append(diffs, "leftover "+left.String())
	}
	return diffs
}

// leftovers returns what is ours but not wanted.
func (s *state) leftovers(want nft.Ruleset) (left []layout.Leftover) {
	for _, h := range s.held {
		left = append(left, h.Leftovers(want)...)
	}
	return left
}

// isOurs returns a function that reports whether a chain is ours.
func (s *state) isOurs(want nft.Ruleset) func(nfnetlink.Chain) bool {
	var owns []func(nfnetlink.Chain) bool
	for _, h := range s.held {
		owns = append(owns, h.Owns(want))
	}
	return func(c nfnetlink.Chain) bool {
		return slices.ContainsFunc(owns, func(is func(nfnetlink.Chain) bool) bool { return is(c) })
	}
}

// plan plans the transactions that activate the wanted ruleset and remove the
// leftovers of another layout, another name or another agent.
func (s *state) plan(want nft.Ruleset, staged layout.Staged) (*layout.Plan, error) {
	p := &layout.Plan{}
	for _, h := range s.held {
		if err := h.Plan(want, staged, p); err != nil {
			return nil, err
		}
	}
	for _, l := range s.legacy {
		l.Remove(&p.Switch)
		for _, name := range l.Held {
			p.Emptied = append(p.Emptied, layout.ChainID{Family: l.Family, Table: l.Table, Chain: name})
		}
	}
	return p, nil
}
