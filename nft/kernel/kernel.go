package kernel

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A Kernel is the ruleset of a network namespace. It is for one goroutine: another one
// opens a Kernel of its own. Only Counters, XTables and Close may be called at
// any time, and do not wait for an Apply.
type Kernel struct {
	conn, scraping *nfnetlink.Conn
	xtables        func() ([]xtables.LegacyTable, error) // of the thread's namespace
	// right is the ruleset that the last Apply left in the kernel, none after one that failed.
	right nft.Ruleset
}

// Open returns the ruleset of the network namespace in which the first request is
// made. Without CAP_NET_ADMIN or nf_tables, all requests fail.
func Open() *Kernel {
	k := New(nfnetlink.Dial())
	k.xtables = func() ([]xtables.LegacyTable, error) { return xtables.OlderTables("/proc/thread-self/net") }
	return k
}

// New uses the caller's connection, and reads nothing else.
func New(c *nfnetlink.Conn) *Kernel {
	noTables := func() ([]xtables.LegacyTable, error) { return nil, nil }
	return &Kernel{conn: c, scraping: c.Another(), xtables: noTables}
}

// Another returns the same ruleset with connections of its own.
func (k *Kernel) Another() *Kernel {
	another := New(k.conn.Another())
	another.xtables = k.xtables
	return another
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
func (k *Kernel) Read(ctx context.Context, want nft.Ruleset, depth nft.Depth) (*State, error) {
	s, _, err := k.look(ctx, want, depth)
	return s, err
}

// Applied is what [Kernel.Apply] did.
type Applied struct {
	// Differences are those that were found and removed; none if nothing was written. With an error
	// they are those that were found, and are still there.
	Differences []string
	// TookOver are the names of other agents' chains that were removed, Removed
	// those of leftovers of another mode or chain name of ours.
	TookOver, Removed []string
	// Replaced are the chains of mode iptables-nft that others had written.
	Replaced []string
	// Read is the generation of the ruleset that was compared, and Generation that at which everything was
	// right. If another program wrote in the meantime, that is 0, or not the last one.
	Read, Generation uint32
	// Recreated is set if our table was deleted and created again, because it had something
	// that is not ours.
	Recreated bool
	Took      time.Duration
}

// Apply writes the differences between the kernel and the wanted ruleset. What
// packets see changes in one transaction; if the kernel rejects it, the old rules
// stay, and the error wraps the kernel's errno. A context that ends before that
// transaction leaves the old rules, too. After a few seconds next to programs that write all
// the time, the error is [nfnetlink.ErrBusy]. [nft.Frame] is [nft.Contents] unless the last Apply
// wanted the same policy.
func (k *Kernel) Apply(ctx context.Context, want nft.Ruleset, depth nft.Depth) (a Applied, err error) {
	start := time.Now()
	if depth == nft.Frame && !k.right.SamePolicy(want) {
		depth = nft.Contents
	}
	s, found, err := k.look(ctx, want, depth)
	a.Differences = texts(found)
	if err != nil {
		if !Delayed(err) {
			k.right = nft.Ruleset{}
		}
		return a, err
	}
	a.Read = s.generation
	a.Generation = s.generation
	if len(found) > 0 {
		k.right = nft.Ruleset{}
		if err := k.write(ctx, s, found, &a); err != nil {
			return Applied{Differences: a.Differences}, err
		}
		a.describe(found)
	}
	if depth >= nft.Everything {
		_, _ = RemoveTrace(k.In(ctx)) // which disturbs nobody, and is tried again
	}
	k.right = want
	a.Took = time.Since(start)
	return a, nil
}

// look reads the kernel and compares. Another program's transaction can make a
// dump inconsistent without notice, so a difference counts only if there was none, or
// if two reads agree. What other agents left is looked for once.
func (k *Kernel) look(ctx context.Context, want nft.Ruleset, depth nft.Depth) (s *State,
	diffs []nft.Difference, err error,
) {
	var last []string
	err = nfnetlink.Again(ctx, func() error {
		current, err := k.read(ctx, want, depth, s)
		if err != nil {
			return err
		}
		s = current
		diffs = s.Differences()
		if len(diffs) == 0 {
			return nil
		}
		generation, err := k.ended(diffs)
		found := texts(diffs)
		if err == nil && generation != s.generation && !slices.Equal(found, last) {
			last = found
			return nfnetlink.ErrInterrupted
		}
		return err
	})
	return s, diffs, err
}

// write removes differences.
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
	generation uint32 // at which everything is right; 0: unknown, because the last try compared only a part
}

// try plans and writes once. It returns [nfnetlink.ErrInterrupted] if it is to be called again.
func (c *change) try(ctx context.Context) error {
	c.tries++
	if c.tries > 1 {
		if err := c.readAgain(ctx); err != nil || len(c.found) == 0 {
			return err
		}
	}
	if obstacle := prevented(c.found); obstacle != nil {
		return obstacle
	}
	replacer, replaceable := c.state.wanted.(nft.Replacer)
	if !hasKind(c.found, nft.Odd) {
		err := c.state.carryOut(ctx)
		if err == nil && c.tries == 1 {
			c.generation = c.state.generation
		}
		if !replaceable || c.recreated || !mayComeFromTheTable(err) {
			return c.state.metOthers(err)
		}
		// It may have met what another program was writing. If that is not in the table, it is something else there.
		found := texts(c.found)
		if !slices.Equal(found, c.rejected) {
			c.rejected = found
			return nfnetlink.ErrInterrupted
		}
	}
	c.state.written = true
	if err := replacer.Replace(c.state.commit); err != nil {
		return c.state.metOthers(err)
	}
	c.recreated = true
	return nfnetlink.ErrInterrupted
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

// ended returns the generation. If we would replace our table, or cannot write, transactions that were not finished
// have ended then: the kernel counts at once what they add, and lists it from the next generation on.
func (k *Kernel) ended(diffs []nft.Difference) (uint32, error) {
	if hasKind(diffs, nft.Odd) || hasKind(diffs, nft.Prevented) {
		if err := k.conn.Settle(); err != nil {
			return 0, err
		}
	}
	return k.conn.Generation()
}

// mayComeFromTheTable reports whether a rejection may be due to what another
// program did to our table, rather than to a missing privilege or memory.
func mayComeFromTheTable(err error) bool {
	var rejected *nfnetlink.RejectedError
	return errors.As(err, &rejected) && !nfnetlink.IsAny(err, unix.ERESTART, unix.EPERM, unix.EACCES, unix.ENOMEM)
}

// describe adds what was done about differences.
func (a *Applied) describe(diffs []nft.Difference) {
	for _, d := range diffs {
		switch d.Kind {
		case nft.OlderAgents:
			a.TookOver = append(a.TookOver, d.Text)
		case nft.Leftover:
			a.Removed = append(a.Removed, d.Text)
		case nft.Replaced:
			a.Replaced = append(a.Replaced, d.Text)
		case nft.Drift, nft.Odd, nft.Prevented:
		}
	}
}

func hasKind(diffs []nft.Difference, kind nft.DifferenceKind) bool {
	return slices.ContainsFunc(diffs, func(d nft.Difference) bool { return d.Kind == kind })
}

func texts(diffs []nft.Difference) (list []string) {
	for _, d := range diffs {
		list = append(list, d.String())
	}
	return list
}

// prevented returns why differences cannot be removed, if so.
func prevented(diffs []nft.Difference) error {
	for _, d := range diffs {
		if d.Err != nil {
			return d.Err
		}
	}
	return nil
}
