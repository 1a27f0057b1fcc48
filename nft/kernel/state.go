package kernel

import (
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/xtables"
)

// A State is what the kernel has at one generation: our rules, compared with the wanted
// ones.
type State struct {
	Want       nft.Ruleset
	depth      layout.Depth
	conn       *nfnetlink.Conn
	words      facts.Words
	generation uint32
	modes      []layout.State // those of the readers, nil if not read
	wanted     layout.State   // nil: no rules are wanted
	legacy     []older.Chain
}

// Unread returns a state of which only is known what is wanted.
func Unread(want nft.Ruleset) *State { return &State{Want: want} }

// A reader reads the rules of a mode.
type reader struct {
	mode nft.Mode
	read func(c *nfnetlink.Conn, want, has nft.Ruleset, depth layout.Depth, staged layout.State) (layout.State, error)
}

func readers() []reader {
	return []reader{{nft.ModeNFTables, native.Read}, {nft.ModeIPTables, xtables.Read}}
}

// read reads the kernel's state. With the one of an earlier attempt to write, it reads no
// elements: they were compared then, or written.
func (k *Kernel) read(ctx context.Context, want nft.Ruleset, depth layout.Depth, staged *State) (*State, error) {
	c := k.conn.In(ctx)
	generation, err := c.Generation()
	if err != nil {
		return nil, err
	}
	s := &State{Want: want, depth: depth, conn: k.conn, words: k.words, generation: generation}
	var has nft.Ruleset // that the kernel has, if nobody has committed since that was read or written
	if generation == k.rightAt && !k.right.Same(want) {
		has = k.right
	}
	for i, r := range readers() {
		var earlier, now layout.State
		if staged != nil {
			earlier = staged.modes[i]
		}
		if r.mode == want.Mode() || depth > layout.Ours {
			if now, err = r.read(c, want, has, depth, earlier); err != nil {
				return nil, err
			}
		}
		if s.modes = append(s.modes, now); r.mode == want.Mode() {
			s.wanted = now
		}
	}
	if depth == layout.TakeOver {
		all, err := older.List(c)
		if err != nil {
			return nil, err
		}
		if s.legacy, err = older.Find(all, want, s.words); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Installed returns our rules that the kernel has, of any mode and whatever other programs
// have done to them since; false if there are none.
func (s *State) Installed() (found layout.Installed, ok bool) {
	for _, m := range s.modes {
		if found, ok = m.Installed(); ok {
			break
		}
	}
	return found, ok
}

// Foreign returns [nft.ErrForeignChain] if the wanted rules cannot be written without
// deleting another program's.
func (s *State) Foreign() error {
	for _, d := range s.Differences() {
		if d.Kind == layout.Foreign {
			return d.Err
		}
	}
	return nil
}

// differences returns those that count: if our rules were right before, those of other agents in
// our chain are just drift.
func (s *State) differences(first bool) []layout.Difference {
	if first {
		return s.Differences()
	}
	return s.Drift()
}

// Drift describes how the state differs from the wanted one, if the rules in our chain are ours.
func (s *State) Drift() []layout.Difference {
	return slices.DeleteFunc(s.Differences(), func(d layout.Difference) bool {
		return d.Kind == layout.Unsigned || d.Kind == layout.Foreign
	})
}

// Differences describes how the state differs from the wanted one.
func (s *State) Differences() (diffs []layout.Difference) {
	for _, l := range older.Removable(s.legacy) {
		d := layout.Difference{Kind: layout.Older, Text: l.String(), Rules: l}
		if l.Held {
			d.Emptied = []nfnetlink.ChainID{l.ChainID}
		}
		diffs = append(diffs, d)
	}
	for _, m := range s.modes {
		if m != nil {
			diffs = append(diffs, m.Differences(s.words)...)
		}
	}
	return diffs
}

// commit sends a transaction that is right at any generation.
func (s *State) commit(b *nfnetlink.Batch) error {
	err := s.commitAt(b, 0)
	if nfnetlink.IsAny(err, unix.ENOENT, unix.EEXIST, unix.ENOTEMPTY, unix.EBUSY) { // intervals that overlap: ENOTEMPTY
		// It may have met what another program has just written.
		if now, _ := s.conn.Generation(); now != s.generation {
			return nfnetlink.ErrInterrupted
		}
	}
	return err
}

// commitNow sends a transaction that is right only if nobody has written since the state was read.
func (s *State) commitNow(b *nfnetlink.Batch) error { return s.commitAt(b, s.generation) }

func (s *State) commitAt(b *nfnetlink.Batch, generation uint32) error {
	if b.Len() == 0 {
		return nil
	}
	err := s.conn.Commit(b, generation)
	if err == nil {
		s.generation++
	}
	return err
}

// carryOut turns the state into the wanted one.
func (s *State) carryOut(ctx context.Context) error {
	if s.wanted != nil {
		if err := s.wanted.Stage(ctx, s.commit); err != nil {
			return err
		}
	}
	now, after, atAny := &nfnetlink.Batch{}, &nfnetlink.Batch{}, true
	for _, m := range s.modes {
		if m != nil {
			before := now.Len()
			right := m.Switch(now, after)
			atAny = atAny && (right || now.Len() == before)
		}
	}
	if gone := older.Removable(s.legacy); len(gone) > 0 {
		older.Remove(gone, now)
		atAny = false
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	commit := s.commit
	if !atAny {
		commit = s.commitNow
	}
	if err := commit(now); err != nil || after.Len() == 0 {
		return err
	}
	nfnetlink.AwaitPackets()
	return s.commit(after)
}
