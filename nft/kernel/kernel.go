package kernel

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/xtables"
)

// A Kernel is the ruleset of a network namespace. It is for one goroutine: another one
// opens a Kernel of its own. Only Counters, XTables and Close may be called at
// any time, and do not wait for an Apply.
type Kernel struct {
	conn, scraping *nfnetlink.Conn
	words          facts.Words
	xtables        func() ([]older.XTable, error) // of the thread's namespace
	// settled is the layout whose rules were right once: since then, rules of other agents
	// in our chain are just drift.
	settled nft.Layout
	// right is the ruleset that the last Apply wanted, unless it failed, and rightAt the generation at
	// which the kernel had it, 0 if that is not known.
	right   nft.Ruleset
	rightAt uint32
}

// Open returns the ruleset of the network namespace in which the first request is
// made. Without CAP_NET_ADMIN or nf_tables, all requests fail. Rules of other programs are in
// messages as words has them.
func Open(words facts.Words) *Kernel {
	k := New(nfnetlink.Dial(), words)
	k.xtables = func() ([]older.XTable, error) { return older.XTables("/proc/thread-self/net") }
	return k
}

// New uses the caller's connection, and reads nothing else.
func New(c *nfnetlink.Conn, words facts.Words) *Kernel {
	none := func() ([]older.XTable, error) { return nil, nil }
	return &Kernel{conn: c, scraping: c.Another(), words: words, xtables: none}
}

// In returns the connection, whose requests end when ctx does.
func (k *Kernel) In(ctx context.Context) *nfnetlink.Conn { return k.conn.In(ctx) }

// Close closes the connection; the rules stay.
func (k *Kernel) Close() error { return errors.Join(k.conn.Close(), k.scraping.Close()) }

// Generation returns the generation of the ruleset, which each transaction changes.
func (k *Kernel) Generation() (uint32, error) { return k.conn.Generation() }

// Counters reads the number of connections by verdict; nothing if there are no rules.
func (k *Kernel) Counters(l nft.Layout) ([]nft.Counts, error) {
	if l.Mode() == nft.ModeIPTables {
		return xtables.Counters(k.scraping, l.Chain())
	}
	return native.Counters(k.scraping)
}

// Read reads the kernel, to compare it with the wanted ruleset without writing.
func (k *Kernel) Read(ctx context.Context, want nft.Ruleset, depth layout.Depth) (*State, error) {
	s, _, err := k.look(ctx, want, depth, true)
	return s, err
}

// Applied is what [Kernel.Apply] did.
type Applied struct {
	// Differences are those that were found and removed; none if nothing was
	// written.
	Differences []string
	// TookOver are the names of other agents' chains that were removed, Removed
	// those of leftovers of another mode or chain name of ours.
	TookOver, Removed []string
	// Replaced are the rules of other agents that were in the chain of mode
	// iptables-nft.
	Replaced []string
	// Generation of the ruleset at which everything was right. If another program wrote in the
	// meantime, it is 0, or not the last one.
	Generation uint32
	// Recreated is set if our table was deleted and created again, because it had something
	// that is not ours.
	Recreated bool
	Took      time.Duration
}

// Apply writes the differences between the kernel and the wanted ruleset. What
// packets see changes in one transaction; if the kernel rejects it, the old rules
// stay, and the error wraps the kernel's errno. A context that ends before that
// transaction leaves the old rules, too. After a few seconds next to programs that write all
// the time, the error is [nfnetlink.ErrBusy]. [layout.Frame] is [layout.Ours] unless the last Apply
// wanted the same.
func (k *Kernel) Apply(ctx context.Context, want nft.Ruleset, depth layout.Depth) (a Applied, err error) {
	start := time.Now()
	if depth == layout.Frame && !k.right.Same(want) {
		depth = layout.Ours
	}
	first := k.settled != want.Layout
	s, diffs, err := k.look(ctx, want, depth, first)
	switch {
	case err != nil:
	case len(diffs) == 0:
		a.Generation = s.generation
	default:
		a, err = k.write(ctx, s, diffs, first)
	}
	if err != nil {
		k.right, k.rightAt = nft.Ruleset{}, 0
		return a, err
	}
	if depth == layout.TakeOver {
		_, _ = RemoveTrace(k.In(ctx)) // which disturbs nobody, and is tried again
	}
	k.settled, k.right, k.rightAt = want.Layout, want, a.Generation
	a.Took = time.Since(start)
	return a, nil
}

// look reads the kernel and compares. Another program's transaction can make a
// dump inconsistent without notice, so a difference counts only if there was none, or
// if two reads agree. Rules in our chain may be another agent's at first.
func (k *Kernel) look(ctx context.Context, want nft.Ruleset, depth layout.Depth, first bool) (s *State,
	diffs []layout.Difference, err error,
) {
	var last []string
	err = nfnetlink.Again(ctx, func() error {
		if s, err = k.read(ctx, want, depth, nil); err != nil {
			return err
		}
		if diffs = s.differences(first); len(diffs) == 0 {
			return nil
		}
		now, err := k.ended(diffs)
		if found := texts(diffs); err == nil && now != s.generation && !slices.Equal(found, last) {
			last = found
			return nfnetlink.ErrInterrupted
		}
		return err
	})
	return s, diffs, err
}

// write removes the differences of a state, and describes them. After another program's
// transaction it reads again, and continues with what it has staged.
func (k *Kernel) write(ctx context.Context, s *State, found []layout.Difference, first bool) (a Applied, err error) {
	a.Differences = texts(found)
	diffs := found
	n, unfit := 0, 0
	err = nfnetlink.Again(ctx, func() (err error) {
		if n++; n > 1 {
			now, err := k.read(ctx, s.Want, s.depth, s)
			if err != nil {
				return err
			}
			s, now.words = now, nil // they were described before, and time counts
			diffs = s.differences(first)
		}
		replacer, _ := s.wanted.(layout.Replacer)
		stuck := prevented(diffs)
		odd := slices.ContainsFunc(diffs, func(d layout.Difference) bool { return d.Kind == layout.Odd })
		switch {
		case len(diffs) == 0:
			return nil
		case odd || stuck != nil:
			if now, err := k.ended(diffs); err != nil {
				return err
			} else if now != s.generation {
				return nfnetlink.ErrInterrupted
			}
			if stuck != nil && unfit > 0 {
				return stuck
			}
		case unfit < 2:
			err = s.carryOut(ctx)
			if replacer == nil || a.Recreated || !mayComeFromTheTable(err) {
				if err == nil && n == 1 {
					a.Generation = s.generation
				}
				return err
			}
		}
		// A transaction that is then aborted counts in what was read, too: only the second such read decides.
		if unfit++; unfit >= 2 && stuck == nil {
			if err := replacer.Replace(s.commitNow); err != nil {
				return err
			}
			unfit, a.Recreated = 0, true
		}
		return nfnetlink.ErrInterrupted
	})
	if err != nil {
		return Applied{}, err
	}
	k.describe(&a, found)
	return a, nil
}

// ended returns the generation. If we would replace our table, or cannot write, transactions that were not finished
// have ended then: the kernel counts at once what they add, and lists it from the next generation on.
func (k *Kernel) ended(diffs []layout.Difference) (uint32, error) {
	counted := func(d layout.Difference) bool { return d.Kind == layout.Odd || d.Kind == layout.Prevented }
	if slices.ContainsFunc(diffs, counted) {
		if err := k.conn.Settle(); err != nil {
			return 0, err
		}
	}
	return k.conn.Generation()
}

// mayComeFromTheTable reports whether a rejection may be due to what another
// program did to our table, rather than to a missing privilege or memory.
func mayComeFromTheTable(err error) bool {
	var refused *nfnetlink.RefusedError
	return errors.As(err, &refused) && !nfnetlink.IsAny(err, unix.ERESTART, unix.EPERM, unix.EACCES, unix.ENOMEM)
}

// describe adds what was done about differences.
func (k *Kernel) describe(a *Applied, diffs []layout.Difference) {
	for _, d := range diffs {
		switch {
		case d.Kind == layout.Older:
			a.TookOver = append(a.TookOver, d.Text)
		case d.Kind == layout.Leftover:
			a.Removed = append(a.Removed, d.Text)
		case d.Kind == layout.Unsigned && d.Rules.Rules > 0:
			a.Replaced = append(a.Replaced, d.Rules.String())
		}
	}
	a.Removed = append(a.Removed, k.emptied(diffs)...)
}

func texts(diffs []layout.Difference) (out []string) {
	for _, d := range diffs {
		out = append(out, d.String())
	}
	return out
}

// prevented returns why differences cannot be removed, if so.
func prevented(diffs []layout.Difference) error {
	for _, d := range diffs {
		if d.Err != nil {
			return d.Err
		}
	}
	return nil
}
