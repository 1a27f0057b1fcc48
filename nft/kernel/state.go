package kernel

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A state is our rules in the kernel, and those of older agents, at one generation.
type state struct {
	generation uint32
	held       []layout.Held
	legacy     []foreign.LegacyChain // if a takeover is requested
}

// read reads the kernel's state. What was verified before completes the scope.
func (k *Kernel) read(ctx context.Context, want nft.Ruleset, l Look, scope layout.Scope) (*state, error) {
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
	for _, r := range k.readers {
		h, err := r.Read(ctx, want, scope)
		if err != nil {
			return nil, err
		}
		s.held = append(s.held, h)
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

// inFull reports whether everything was read.
func (s *state) inFull() bool {
	for _, h := range s.held {
		if !h.InFull() {
			return false
		}
	}
	return true
}

// differences describes how the state differs from the wanted one.
func (s *state) differences(want nft.Ruleset) []string {
	var diffs []string
	for _, l := range s.legacy {
		diffs = append(diffs, "another agent's "+l.String())
	}
	for _, h := range s.held {
		diffs = append(diffs, h.Differences(want)...)
	}
	for _, left := range s.leftovers(want) {
		diffs = append(diffs, "leftover "+left)
	}
	return diffs
}

// unsigned returns the chains with our name that an older agent, or an older
// version, wrote.
func (s *state) unsigned(want nft.Ruleset) (diffs []string) {
	for _, h := range s.held {
		diffs = append(diffs, h.Unsigned(want)...)
	}
	return diffs
}

// leftovers returns the names of our rules that are not wanted.
func (s *state) leftovers(want nft.Ruleset) (left []string) {
	for _, h := range s.held {
		for _, l := range h.Leftovers(want) {
			left = append(left, l.String())
		}
	}
	return left
}

func (s *state) check(want nft.Ruleset, first bool) error {
	for _, h := range s.held {
		if err := h.Check(want, first); err != nil {
			return err
		}
	}
	return nil
}

// replaces returns the rules of other agents in the place of ours.
func (s *state) replaces(want nft.Ruleset) (found []foreign.LegacyChain) {
	for _, h := range s.held {
		found = append(found, h.Replaces(want)...)
	}
	return found
}

// isOurs returns a function that reports whether a chain is ours.
func (s *state) isOurs(want nft.Ruleset) func(nfnetlink.Chain) bool {
	var owns []func(nfnetlink.Chain) bool
	for _, h := range s.held {
		owns = append(owns, h.Owns(want))
	}
	return func(c nfnetlink.Chain) bool {
		for _, is := range owns {
			if is(c) {
				return true
			}
		}
		return false
	}
}

// stage writes what no rule refers to yet.
func (s *state) stage(ctx context.Context, want nft.Ruleset) (all layout.Staged, err error) {
	for _, h := range s.held {
		staged, err := h.Stage(ctx, want)
		if err != nil {
			return layout.Staged{}, err
		}
		if staged.Transactions > 0 || staged.Sides != nil {
			all = staged
		}
	}
	return all, nil
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
