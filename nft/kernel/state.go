package kernel

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A state is our rules in the kernel, and those of older agents, at one generation.
type state struct {
	generation uint32
	modes      []layout.State // those of the readers, nil if not read
	wanted     layout.State   // nil: no rules are wanted
	legacy     []foreign.LegacyChain
}

// A reader reads the rules of a mode.
type reader struct {
	mode nft.Mode
	read func(c *nfnetlink.Conn, want nft.Ruleset, depth layout.Depth, before layout.State) (layout.State, error)
}

func readers() []reader {
	return []reader{{nft.ModeNFTables, native.Read}, {nft.ModeIPTables, xtables.Read}}
}

// read reads the kernel's state. With an earlier one, the elements of sets that are still
// the same are not read again.
func (k *Kernel) read(ctx context.Context, want nft.Ruleset, depth layout.Depth, before *state) (*state, error) {
	c := k.conn.In(ctx)
	generation, err := c.Generation()
	if err != nil {
		return nil, err
	}
	s := &state{generation: generation}
	for i, r := range readers() {
		var earlier, now layout.State
		if before != nil {
			earlier = before.modes[i]
		}
		if r.mode == want.Mode() || depth > layout.Ours {
			if now, err = r.read(c, want, depth, earlier); err != nil {
				return nil, err
			}
		}
		if s.modes = append(s.modes, now); r.mode == want.Mode() {
			s.wanted = now
		}
	}
	if depth == layout.TakeOver {
		snapshot, err := foreign.Read(ctx, c, s.owns)
		if err != nil {
			return nil, err
		}
		s.legacy = foreign.Legacy(snapshot)
	}
	return s, nil
}

// owns reports whether a chain is ours, or will be.
func (s *state) owns(c nfnetlink.Chain) bool {
	for _, m := range s.modes {
		if m != nil && m.Owns(c) {
			return true
		}
	}
	return false
}

// differences describes how the state differs from the wanted one.
func (s *state) differences() (diffs []layout.Difference) {
	for _, l := range s.legacy {
		d := layout.Difference{Kind: layout.Older, Text: l.String(), Rules: l}
		for _, name := range l.Held {
			d.Emptied = append(d.Emptied, layout.ChainID{Family: l.Family, Table: l.Table, Chain: name})
		}
		diffs = append(diffs, d)
	}
	for _, m := range s.modes {
		if m != nil {
			diffs = append(diffs, m.Differences()...)
		}
	}
	return diffs
}

// carryOut turns the state into the wanted one.
func (s *state) carryOut(ctx context.Context, commit layout.Commit) error {
	if s.wanted != nil {
		if err := s.wanted.Stage(ctx, commit); err != nil {
			return err
		}
	}
	now, after := &nfnetlink.Batch{}, &nfnetlink.Batch{}
	for _, m := range s.modes {
		if m != nil {
			m.Switch(now, after)
		}
	}
	for _, l := range s.legacy {
		l.Remove(now)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := commit(now); err != nil {
		return err
	}
	return commit(after)
}
