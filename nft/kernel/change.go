package kernel

import (
	"context"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// write makes the kernel have what is wanted, and adds to a what that did.
func (k *Kernel) write(ctx context.Context, s *State, found []nft.Difference, a *Applied) error {
	c := change{kernel: k, state: s, found: found}
	err := nfnetlink.Again(ctx, func() error { return c.try(ctx) })
	a.Recreated = c.recreated
	a.Generation = c.generation
	return err
}

// A change is the way to the wanted ruleset: sets are filled, chains are written with a switch to these sets, or our
// table is replaced. Each of its transactions is right whatever other programs have committed since the kernel was
// read, or it is rejected; then the kernel is read again, but not what was compared or filled.
type change struct {
	kernel     *Kernel
	state      *State
	found      []nft.Difference
	tries      int
	rejected   []string // the differences of the last try, if the kernel rejected it
	recreated  bool
	generation uint32 // at which everything was right; 0: unknown, because the last try compared only a part
}

// try plans and writes once. It returns [nfnetlink.ErrReadAgain] if it is to be called again.
func (c *change) try(ctx context.Context) error {
	c.tries++
	if c.tries > 1 {
		if err := c.readAgain(ctx); err != nil || len(c.found) == 0 {
			return err
		}
	}
	if err := whyImpossible(c.found); err != nil {
		return err
	}
	replacer, replaceable := c.state.wanted.(nft.Replacer)
	if hasKind(c.found, nft.Unexpected) { // only a Replacer has differences of this kind
		return c.replaceTable(replacer)
	}
	err := c.state.stageAndSwitch(ctx)
	if err == nil {
		if c.tries == 1 {
			c.generation = c.state.generation
		}
		return nil
	}
	if !replaceable || c.recreated || !mayComeFromTheTable(err) {
		return c.state.retryIfOthersWrote(err)
	}
	// The first rejection may come from what another program was just writing. The second one with the same differences
	// comes from something in our table that the kernel does not list.
	found := texts(c.found)
	if !slices.Equal(found, c.rejected) {
		c.rejected = found
		return nfnetlink.ErrReadAgain
	}
	return c.replaceTable(replacer)
}

// replaceTable replaces our table. After success it asks for another try, which reads whether the table is right.
func (c *change) replaceTable(replacer nft.Replacer) error {
	if err := replacer.Replace(c.state.commit); err != nil {
		return c.state.retryIfOthersWrote(err)
	}
	c.recreated = true
	return nfnetlink.ErrReadAgain
}

// readAgain reads what tells whether what was compared and filled is still there.
func (c *change) readAgain(ctx context.Context) error {
	s, err := c.kernel.read(ctx, c.state.Want, c.state.depth, c.state)
	if err != nil {
		return err
	}
	c.state = s
	c.found = s.Differences()
	return nil
}

// commit sends a transaction. Then the generation of the state is the new one, or 0 if another program may have
// written, too. A batch that surely changes something raises the generation by one: any more is another program's.
// One that may change nothing may not raise it, so that an increment by one can be another program's.
func (s *State) commit(b *nfnetlink.Batch) error {
	if b.Len() == 0 {
		return nil
	}
	if err := s.conn.Commit(b); err != nil {
		return err
	}
	alone := b.Changes() && b.Generation-s.generation <= 1
	s.generation = 0
	if alone {
		s.generation = b.Generation
	}
	return nil
}

// retryIfOthersWrote returns [nfnetlink.ErrReadAgain] for a rejection if that may be due to what another program has
// written since the state was read, also if the generation of the state is unknown.
func (s *State) retryIfOthersWrote(err error) error {
	// ENOTEMPTY is the errno for intervals that overlap.
	if nfnetlink.IsAny(err, unix.ENOENT, unix.EEXIST, unix.ENOTEMPTY, unix.EBUSY) {
		if current, _ := s.conn.Generation(); current != s.generation {
			return nfnetlink.ErrReadAgain
		}
	}
	return err
}

// stageAndSwitch fills new sets, and commits the transaction from which on packets get the wanted verdicts. Once no
// packet is in the old rules any more, it commits a second one with what had to stay until then.
func (s *State) stageAndSwitch(ctx context.Context) error {
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
	s.findAgain = err != nil && !errors.Is(err, unix.ERESTART)
	if s.findAgain && len(s.leftover) > 0 && nfnetlink.IsAny(err, unix.ENOENT, unix.EBUSY) {
		return nfnetlink.ErrReadAgain // a leftover has gone, or something refers to it now
	}
	if err != nil || second.Len() == 0 {
		return err
	}
	nfnetlink.AwaitPackets()
	return s.commit(second)
}

// mayComeFromTheTable reports whether a rejection may be due to what another
// program did to our table, rather than to a missing privilege or memory.
func mayComeFromTheTable(err error) bool {
	var rejected *nfnetlink.RejectedError
	return errors.As(err, &rejected) && !nfnetlink.IsAny(err, unix.ERESTART, unix.EPERM, unix.EACCES, unix.ENOMEM)
}

func hasKind(diffs []nft.Difference, kind nft.DifferenceKind) bool {
	return slices.ContainsFunc(diffs, func(d nft.Difference) bool { return d.Kind == kind })
}

// whyImpossible returns why differences cannot be removed, if so.
func whyImpossible(diffs []nft.Difference) error {
	for _, d := range diffs {
		if d.Err != nil {
			return d.Err
		}
	}
	return nil
}
