package kernel

import (
	"context"
	"errors"
	"slices"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/xtables"
)

// A Kernel is the ruleset of a network namespace. It is for one goroutine: another one uses [Kernel.Another]. Only
// Counters, LegacyTables and Close may be called at any time, and do not wait for an Apply.
type Kernel struct {
	conn, scraping *nfnetlink.Conn
	legacyTables   func() ([]xtables.LegacyTable, error) // of the thread's namespace
	lastApplied    nft.Ruleset                           // what the kernel got last; zero after an Apply that failed
}

// Open returns the ruleset of a network namespace. It always succeeds: the first request opens the socket, in the
// namespace of its thread. Without CAP_NET_ADMIN or nf_tables, each request returns the error.
func Open() *Kernel {
	k := New(nfnetlink.Dial())
	k.legacyTables = func() ([]xtables.LegacyTable, error) { return xtables.OlderTables("/proc/thread-self/net") }
	return k
}

// New returns the ruleset that a connection leads to. It finds no tables of legacy ip_tables, which another kind of
// socket lists.
func New(c *nfnetlink.Conn) *Kernel {
	noTables := func() ([]xtables.LegacyTable, error) { return nil, nil }
	return &Kernel{conn: c, scraping: c.Another(), legacyTables: noTables}
}

// Another returns the same ruleset with connections of its own.
func (k *Kernel) Another() *Kernel {
	another := New(k.conn.Another())
	another.legacyTables = k.legacyTables
	return another
}

// In returns the connection for reads that end when ctx does; see [nfnetlink.Conn.In].
func (k *Kernel) In(ctx context.Context) *nfnetlink.Conn { return k.conn.In(ctx) }

// Close closes the connection; the rules stay.
func (k *Kernel) Close() error { return errors.Join(k.conn.Close(), k.scraping.Close()) }

// Generation returns the generation of the ruleset, which each transaction changes.
func (k *Kernel) Generation() (uint32, error) { return k.conn.Generation() }

// Counters reads how many connections had each verdict since the counters were created, by family: none if there are no
// rules. It has a connection of its own.
func (k *Kernel) Counters(l nft.Layout) ([]nft.Counts, error) {
	if l.Mode() == nft.ModeIPTables {
		return xtables.Counters(k.scraping, l.Chain())
	}
	return native.Counters(k.scraping)
}

// Read reads and compares, and writes nothing. Next to programs that write all the time the error is
// [nfnetlink.ErrBusy]. With an error, the state is not valid.
func (k *Kernel) Read(ctx context.Context, want nft.Ruleset, depth nft.Depth) (*State, error) {
	s, _, err := k.readAndCompare(ctx, want, depth)
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
	// Overwritten are the chains of mode iptables-nft that others had written.
	Overwritten []string
	// Read is the generation of the ruleset that was compared.
	Read uint32
	// Generation is the last one at which everything is known to have been right: 0 if another program may have written
	// before the last transaction of ours.
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
// the time, the error is [nfnetlink.ErrBusy]. [nft.Frame] is [nft.Contents] unless the last Apply
// wanted the same policy.
func (k *Kernel) Apply(ctx context.Context, want nft.Ruleset, depth nft.Depth) (a Applied, err error) {
	start := time.Now()
	if depth == nft.Frame && !k.lastApplied.SamePolicy(want) {
		depth = nft.Contents
	}
	s, found, err := k.readAndCompare(ctx, want, depth)
	a.Differences = texts(found)
	if err != nil {
		if !Delayed(err) {
			k.lastApplied = nft.Ruleset{}
		}
		return a, err
	}
	a.Read = s.generation
	a.Generation = s.generation
	if len(found) > 0 {
		k.lastApplied = nft.Ruleset{}
		if err := k.write(ctx, s, found, &a); err != nil {
			return Applied{Differences: a.Differences}, err
		}
		a.describe(found)
	}
	if depth >= nft.WithLeftovers {
		_, _ = RemoveTrace(k.In(ctx)) // which disturbs nobody, and is tried again
	}
	k.lastApplied = want
	a.Took = time.Since(start)
	return a, nil
}

// readAndCompare reads the kernel and compares. Another program's transaction can make a dump inconsistent without
// notice, so a difference counts only if no transaction came in between, or if two reads agree.
func (k *Kernel) readAndCompare(ctx context.Context, want nft.Ruleset, depth nft.Depth) (s *State,
	diffs []nft.Difference, err error,
) {
	var previous []string
	err = nfnetlink.Again(ctx, func() error {
		s, err = k.read(ctx, want, depth, nil)
		if err != nil {
			return err
		}
		diffs = s.Differences()
		if len(diffs) == 0 {
			return nil
		}
		generation, err := k.generationAfter(diffs)
		found := texts(diffs)
		if err == nil && generation != s.generation && !slices.Equal(found, previous) {
			previous = found
			return nfnetlink.ErrReadAgain
		}
		return err
	})
	return s, diffs, err
}

// generationAfter returns the generation once differences were read. For those of kinds Unexpected and Prevented it
// first waits until transactions in progress end, because the kernel counts what they add before it lists it.
func (k *Kernel) generationAfter(diffs []nft.Difference) (uint32, error) {
	if hasKind(diffs, nft.Unexpected) || hasKind(diffs, nft.Prevented) {
		if err := k.conn.Settle(); err != nil {
			return 0, err
		}
	}
	return k.conn.Generation()
}

// describe adds what was done about differences.
func (a *Applied) describe(diffs []nft.Difference) {
	for _, d := range diffs {
		switch d.Kind {
		case nft.OlderAgents:
			a.TookOver = append(a.TookOver, d.Text)
		case nft.Leftover:
			a.Removed = append(a.Removed, d.Text)
		case nft.Overwritten:
			a.Overwritten = append(a.Overwritten, d.Text)
		case nft.Drift, nft.Unexpected, nft.Prevented:
		}
	}
}

func texts(diffs []nft.Difference) (list []string) {
	for _, d := range diffs {
		list = append(list, d.String())
	}
	return list
}
