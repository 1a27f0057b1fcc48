package kernel

import (
	"context"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A State is what the kernel has at one generation: our rules, compared with the wanted
// ones.
type State struct {
	Want       nft.Ruleset
	depth      nft.Depth
	conn       *nfnetlink.Conn
	generation uint32
	modes      []nft.KernelState    // those of the readers, nil if not read
	wanted     nft.KernelState      // nil: no rules are wanted
	leftover   []xtables.OlderChain // chains that go: ours that are not wanted, and with [nft.TakeOver] older agents'
	stale      bool                 // leftover has changed since it was read
	written    bool                 // it was tried to write what is wanted
}

// A reader reads the rules of a mode.
type reader struct {
	mode nft.Mode
	// read reads the state. last is the ruleset that the last Apply left; at a [nft.Frame] it has the wanted policy.
	read func(c *nfnetlink.Conn, want, last nft.Ruleset, depth nft.Depth, staged nft.KernelState) (nft.KernelState, error)
}

func readers() []reader {
	return []reader{{nft.ModeNFTables, native.Read}, {nft.ModeIPTables, xtables.Read}}
}

// read reads the kernel's state. With an earlier one, what goes is not looked for again, unless it has changed: that
// takes seconds if the tables are large. If it was tried to write that state, no rules and no elements are read, either:
// they were compared then, or written.
func (k *Kernel) read(ctx context.Context, want nft.Ruleset, depth nft.Depth, earlier *State) (*State, error) {
	c := k.conn.In(ctx)
	generation, err := c.Generation()
	if err != nil {
		return nil, err
	}
	staged := earlier != nil && earlier.written
	if !staged {
		if err := c.AwaitCommit(); err != nil {
			return nil, err
		}
	}
	s := &State{Want: want, depth: depth, conn: k.conn, generation: generation}
	for i, r := range readers() {
		var previous, current nft.KernelState
		if staged {
			previous = earlier.modes[i]
		}
		if r.mode == want.Mode() || depth > nft.Contents {
			current, err = r.read(c, want, k.right, depth, previous)
			if err != nil {
				return nil, err
			}
		}
		s.modes = append(s.modes, current)
		if r.mode == want.Mode() {
			s.wanted = current
		}
	}
	// In mode iptables-nft, a policy without IPv6 leaves the chain of one with it.
	withoutIPv6 := want.Mode() == nft.ModeIPTables && len(want.Tables) == 1
	switch {
	case depth < nft.Contents, depth == nft.Contents && !withoutIPv6:
	case earlier != nil && !earlier.stale:
		s.leftover = earlier.leftover
		if !staged {
			s.generation = earlier.generation
		}
	default:
		found, err := xtables.FindOlder(c, want)
		if err != nil {
			return nil, err
		}
		s.leftover = slices.DeleteFunc(found, func(l xtables.OlderChain) bool {
			return !l.Ours && (depth < nft.TakeOver || l.Kept != "")
		})
	}
	return s, nil
}

// Installed returns our rules that the kernel has, of any mode and whatever other programs
// have done to them since; false if there are none.
func (s *State) Installed() (found nft.Installed, ok bool) {
	for _, m := range s.modes {
		if m == nil {
			continue
		}
		found, ok = m.Installed()
		if ok {
			return found, true
		}
	}
	for _, l := range s.leftover {
		if l.Ours && l.Reached() {
			return nft.Installed{Layout: xtables.Layout{Name: l.Name}, Hash: l.Hash}, true
		}
	}
	return nft.Installed{}, false
}

// Differences describes how the state differs from the wanted one.
func (s *State) Differences() (diffs []nft.Difference) {
	for _, l := range s.leftover {
		kind := nft.OlderAgents
		if l.Ours {
			kind = nft.Leftover
		}
		diffs = append(diffs, nft.Difference{Kind: kind, Text: l.String()})
	}
	for _, m := range s.modes {
		if m != nil {
			diffs = append(diffs, m.Differences()...)
		}
	}
	return diffs
}

// commit sends a transaction. Then the generation of the state is the new one, or 0 if another program may have
// written, too: the kernel does not count a transaction that changes nothing.
func (s *State) commit(b *nfnetlink.Batch) error {
	if b.Len() == 0 {
		return nil
	}
	if err := s.conn.Commit(b); err != nil {
		return err
	}
	alone := b.Generation-s.generation <= 1
	s.generation = 0
	if alone && b.Changes() {
		s.generation = b.Generation
	}
	return nil
}

// metOthers returns [nfnetlink.ErrInterrupted] for a rejection if that may be due to what another program has written
// since the state was read.
func (s *State) metOthers(err error) error {
	if nfnetlink.IsAny(err, unix.ENOENT, unix.EEXIST, unix.ENOTEMPTY, unix.EBUSY) { // intervals that overlap: ENOTEMPTY
		if current, _ := s.conn.Generation(); current != s.generation {
			return nfnetlink.ErrInterrupted
		}
	}
	return err
}

// carryOut turns the state into the wanted one.
func (s *State) carryOut(ctx context.Context) error {
	s.written = true
	if s.wanted != nil {
		if err := s.wanted.Stage(ctx, s.commit); err != nil {
			return err
		}
	}
	first := &nfnetlink.Batch{}
	second := &nfnetlink.Batch{}
	for _, m := range s.modes {
		if m != nil {
			m.Switch(first, second)
		}
	}
	xtables.RemoveOlder(s.leftover, first)
	if err := ctx.Err(); err != nil {
		return err
	}
	err := s.commit(first)
	s.stale = err != nil && !errors.Is(err, unix.ERESTART)
	if s.stale && len(s.leftover) > 0 && nfnetlink.IsAny(err, unix.ENOENT, unix.EBUSY) {
		return nfnetlink.ErrInterrupted // of what goes, something has gone, or has come
	}
	if err != nil || second.Len() == 0 {
		return err
	}
	nfnetlink.AwaitPackets()
	return s.commit(second)
}
