package kernel

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
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
	xtables        func() ([]older.XTable, error) // of the thread's namespace
	// settled is the layout whose rules were right once: since then, rules of other agents
	// in our chain are just drift.
	settled nft.Layout
	// right is the last state that was as wanted.
	right *State
}

// Open returns the ruleset of the network namespace in which the first request is
// made. Without CAP_NET_ADMIN or nf_tables, all requests fail.
func Open() *Kernel {
	k := New(nfnetlink.Dial())
	k.xtables = func() ([]older.XTable, error) { return older.XTables("/proc/thread-self/net") }
	return k
}

// New uses the caller's connection, and reads nothing else.
func New(c *nfnetlink.Conn) *Kernel {
	return &Kernel{conn: c, scraping: c.Another(), xtables: func() ([]older.XTable, error) { return nil, nil }}
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
func (k *Kernel) Read(ctx context.Context, want nft.Ruleset, depth layout.Depth) (s *State, err error) {
	t := task{want: want, depth: depth, first: true}
	err = Again(ctx, func() error {
		s, _, err = k.look(ctx, &t)
		return err
	})
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
	// Generation of the ruleset at which everything was right; 0 if it is not known,
	// because another program wrote in the meantime.
	Generation uint32
	// Recreated is for how long at most we had no rules, because our table had something
	// that is not ours and was deleted and created again; 0 if it was not.
	Recreated time.Duration
	Took      time.Duration
}

// Apply writes the differences between the kernel and the wanted ruleset. [layout.Frame]
// is for the one that the last Apply wanted. What
// packets see changes in one transaction; if the kernel rejects it, the old rules
// stay, and the error wraps the kernel's errno. A context that ends before that
// transaction leaves the old rules, too.
func (k *Kernel) Apply(ctx context.Context, want nft.Ruleset, depth layout.Depth) (a Applied, err error) {
	start := time.Now()
	t := task{want: want, depth: depth, first: k.settled != want.Layout}
	if depth == layout.Frame {
		t.before = k.right
	}
	k.right = nil
	err = Again(ctx, func() error {
		a, err = k.attempt(ctx, &t)
		return err
	})
	if err != nil {
		return Applied{}, err
	}
	k.settled = want.Layout
	a.Took = time.Since(start)
	return a, nil
}

// attempts is how often a task is repeated while other programs write.
const attempts = 20

// Again repeats a task until it succeeds, or fails for another reason than that another
// program wrote at the same time. Two agents that fill the same sets would disrupt each
// other forever if they did not wait for different times.
func Again(ctx context.Context, do func() error) (err error) {
	for n := range attempts {
		if err = do(); !disturbed(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rand.N(time.Duration(n+1) * time.Millisecond)):
		}
	}
	return err
}

// disturbed reports whether another program changed the ruleset between reading and
// writing, or whether the outcome is unknown: then read again. While reading, a listed
// object may be gone.
func disturbed(err error) bool {
	return isAny(err, nfnetlink.ErrInterrupted, unix.ERESTART, unix.ENOBUFS, unix.EINTR) ||
		nfnetlink.IsNotExist(err) && !Refused(err)
}

func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
}

// A task is a ruleset that is compared with the kernel, or written, and what earlier
// attempts have found.
type task struct {
	want  nft.Ruleset
	depth layout.Depth
	first bool // its rules were never right in this process
	// before is a state whose differences are certain: elements of its sets need not be
	// read again.
	before    *State
	last      []string            // differences that are not certain
	found     []layout.Difference // the first certain ones
	recreated time.Time           // when our table was deleted
}

// look reads the kernel and compares. Another program's transaction can make a
// dump inconsistent without notice, so a difference counts only if there was none, or
// if two reads agree.
func (k *Kernel) look(ctx context.Context, t *task) (*State, []layout.Difference, error) {
	s, err := k.read(ctx, t.want, t.depth, t.before)
	if err != nil {
		return nil, nil, err
	}
	diffs := s.Differences()
	if !t.first {
		diffs = s.Drift()
	}
	if len(diffs) == 0 || t.found != nil {
		return s, diffs, nil
	}
	now, err := k.conn.Generation()
	if err != nil {
		return nil, nil, err
	}
	if found := texts(diffs); now != s.generation && !slices.Equal(found, t.last) {
		t.last = found
		return nil, nil, nfnetlink.ErrInterrupted
	}
	return s, diffs, nil
}

// attempt makes one attempt to write a ruleset.
func (k *Kernel) attempt(ctx context.Context, t *task) (a Applied, err error) {
	whole := t.before == nil || t.depth == layout.Frame
	s, diffs, err := k.look(ctx, t)
	if err == nil {
		err = prevented(diffs)
	}
	if err != nil {
		return a, err
	}
	if len(diffs) > 0 {
		if t.found == nil {
			t.found = diffs
		}
		if err := k.write(ctx, t, s, diffs); err != nil {
			return a, err
		}
		a = k.applied(t, diffs)
	}
	if whole {
		a.Generation = s.generation
	}
	k.right = s
	return a, nil
}

// write writes the differences of a state, or deletes our table so that the next attempt
// creates it again.
func (k *Kernel) write(ctx context.Context, t *task, s *State, diffs []layout.Difference) error {
	commit := func(b *nfnetlink.Batch) error {
		if b.Len() == 0 {
			return nil
		}
		err := k.conn.Commit(b, s.generation)
		if err == nil {
			s.generation++
		}
		return err
	}
	if slices.ContainsFunc(diffs, func(d layout.Difference) bool { return d.Kind == layout.Odd }) {
		return t.recreate(s, commit)
	}
	err := s.carryOut(ctx, commit)
	switch t.before = nil; {
	case errors.Is(err, unix.ERESTART):
		t.before = s
	case mayComeFromTheTable(err):
		if deleted := t.recreate(s, commit); disturbed(deleted) {
			return deleted
		}
	}
	return err
}

// mayComeFromTheTable reports whether a rejection may be due to what another
// program did to our table, rather than to a missing privilege or memory.
func mayComeFromTheTable(err error) bool {
	var refused *nfnetlink.RefusedError
	return errors.As(err, &refused) && !isAny(err, unix.EPERM, unix.EACCES, unix.ENOMEM)
}

var errOdd = errors.New("another program keeps changing our table while it is created")

// recreate deletes our table. The error is one after which to read again.
func (t *task) recreate(s *State, commit layout.Commit) error {
	r, ok := s.wanted.(layout.Recreator)
	if !ok || !t.recreated.IsZero() {
		return errOdd
	}
	start := time.Now()
	if err := r.Recreate(commit); err != nil {
		return err
	}
	t.recreated, t.before = start, nil
	return nfnetlink.ErrInterrupted
}

// applied returns what was done about differences.
func (k *Kernel) applied(t *task, diffs []layout.Difference) Applied {
	a := Applied{Differences: texts(t.found)}
	if !t.recreated.IsZero() {
		a.Recreated = time.Since(t.recreated)
	}
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
	return a
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
