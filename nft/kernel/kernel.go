package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
)

// A Kernel is the ruleset of a network namespace. It is for one goroutine: another one
// opens a Kernel of its own. Only Counters, XTables, PortID and Close may be called at
// any time, and do not wait for an Apply.
type Kernel struct {
	conn *nfnetlink.Conn
	// legacyChains reads legacy ip_tables in the process's namespace.
	legacyChains func() ([]foreign.XTChain, error)
	readers      []layout.Reader
	verified     verified
}

// verified is what was found in the kernel or written to it.
type verified struct {
	// While the ruleset has this generation, nothing need be read; 0: read again.
	generation uint32
	want       nft.Ruleset
	inFull     bool // everything was read
	others     bool // there are no leftovers of other layouts or names
}

// Open returns the ruleset of the network namespace in which the first request is
// made. Without CAP_NET_ADMIN or nf_tables, all requests fail.
func Open() *Kernel {
	k := New(nfnetlink.Dial())
	k.legacyChains = func() ([]foreign.XTChain, error) { return foreign.LegacyChains("/proc/thread-self/net") }
	return k
}

// New uses the caller's connection.
func New(c *nfnetlink.Conn) *Kernel {
	return &Kernel{
		conn: c, readers: layouts.Readers(c),
		legacyChains: func() ([]foreign.XTChain, error) { return nil, nil },
	}
}

// Close closes the connection; the rules stay.
func (k *Kernel) Close() error {
	err := k.conn.Close()
	for _, r := range k.readers {
		err = errors.Join(err, r.Close())
	}
	return err
}

// PortID returns the netlink port that notifications show for this connection.
func (k *Kernel) PortID() uint32 { return k.conn.PortID() }

// A Look determines how thoroughly the kernel is read.
type Look struct {
	// Full reads all elements of sets of over 10,000 CIDRs even if their count is
	// right.
	Full bool
	// Verify reads our table and chains, without the elements of sets, even if
	// the generation has not changed since the last read: a table owned by a
	// process is deleted with its socket, without a new generation. Full implies
	// Verify.
	Verify bool
	// Quick assumes that verified sets and chains are unchanged if they are the
	// same ones with the same length, regardless of their size. The differences
	// it finds are real, but it may miss some, and the next check does not rely
	// on it. It takes less than a millisecond in either mode, even with 100,000
	// CIDRs.
	Quick bool
	// Others also finds what the other mode installed.
	Others bool
	// TakeOver also finds the rules of iptables-based agents, which Apply then
	// removes in the transaction that activates ours.
	TakeOver bool
}

// Diff describes how the kernel differs from the wanted ruleset, without writing.
func (k *Kernel) Diff(ctx context.Context, want nft.Ruleset, look Look) ([]string, error) {
	_, diffs, err := k.look(ctx, want, look, false)
	return diffs, err
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
	Replaced []foreign.LegacyChain
	// Generation of the ruleset that was read or written; 0 if another program
	// wrote in the meantime.
	Generation uint32
	// Recreated is how long we had no rules because our table could not be
	// repaired in place and was deleted and created again; 0 if it was not.
	Recreated time.Duration
	Took      time.Duration
}

// The number of attempts if another program changed the ruleset in the meantime,
// and if the kernel's error may be due to that, or to a missing feature.
const (
	attempts    = 20
	fewAttempts = 3
)

// fullAttempts is the number of full reads while other programs write. After
// that, large sets and chains with the right count are trusted: a set of 100,000
// CIDRs takes 50 ms to read, and a program that commits more often would make us
// read it 20 times at each resync.
const fullAttempts = 3

// Apply writes the differences between the kernel and the wanted ruleset. What
// packets see changes in one transaction; if the kernel rejects it, the old rules
// stay, and the error wraps the kernel's errno. A context that ends before that
// transaction leaves the old rules, too.
func (k *Kernel) Apply(ctx context.Context, want nft.Ruleset, look Look) (Applied, error) {
	start := time.Now()
	var t tries
	for {
		a, err := k.try(ctx, want, look, &t)
		if err == nil || t.over {
			a.Took = time.Since(start)
			return a, err
		}
		// Otherwise two agents that fill the same sets would disrupt each other
		// forever.
		select {
		case <-ctx.Done():
			return Applied{}, ctx.Err()
		case <-time.After(rand.N(time.Duration(t.n) * time.Millisecond)):
		}
	}
}

// tries records the attempts of [Kernel.Apply].
type tries struct {
	n, refused int
	found      []string // differences of the first one
	over       bool     // another one would not help
}

// try makes one attempt, and rewrites or recreates what cannot be repaired as usual.
func (k *Kernel) try(ctx context.Context, want nft.Ruleset, look Look, t *tries) (Applied, error) {
	t.n++
	a, err := k.apply(ctx, want, look)
	if err == nil {
		a.Generation = k.verified.generation
		return a, nil
	}
	k.verified.generation = 0
	if !outdated(err) {
		t.refused++
	}
	if len(t.found) == 0 {
		t.found = a.Differences
	}
	if errors.Is(err, layout.ErrBroken) || t.refused == 2 && mayComeFromTheTable(err) {
		if gap, recreateErr := k.reader(want).Recreate(ctx, want); recreateErr == nil {
			// Leftovers of other layouts are removed as usual.
			if a, applyErr := k.apply(ctx, want, look); applyErr == nil {
				a.Recreated, a.Differences, a.Generation = gap, t.found, k.verified.generation
				return a, nil
			}
		}
	}
	t.over = t.n >= attempts || t.refused >= 1 && !mayComeFromTheTable(err) || t.refused >= fewAttempts
	return Applied{}, err
}

// reader returns the reader of the wanted layout.
func (k *Kernel) reader(want nft.Ruleset) layout.Reader {
	return k.readers[slices.IndexFunc(k.readers, func(r layout.Reader) bool { return r.Mode() == want.Mode() })]
}

// mayComeFromTheTable reports whether a rejection may be due to what another
// program did to our table, rather than to a missing feature or privilege.
func mayComeFromTheTable(err error) bool {
	var refused *nfnetlink.RefusedError
	return perhapsOutdated(err) || errors.As(err, &refused) && !isAny(err, unix.EPERM, unix.EACCES, unix.ENOMEM, unix.EMSGSIZE)
}

// Check returns [nft.ErrForeignChain] if the layout cannot be written without
// deleting another program's rules.
func (k *Kernel) Check(ctx context.Context, l nft.Layout) error {
	want := nft.Ruleset{Layout: l}
	s, err := k.read(ctx, want, Look{}, layout.Scope{Rules: true}, nil)
	if err != nil {
		return err
	}
	return s.wanted.Check(want, true)
}

// outdated reports whether another program changed the ruleset between reading
// and writing, or whether the outcome is unknown: then read again.
func outdated(err error) bool {
	return isAny(err, layout.ErrOutdated, nfnetlink.ErrInterrupted, unix.ERESTART, unix.ENOBUFS, unix.EINTR)
}

// perhapsOutdated reports whether an error may be due to another program's change.
func perhapsOutdated(err error) bool { return isAny(err, unix.ENOENT, unix.EBUSY, unix.EEXIST) }

// again repeats a read that was interrupted by another program's transaction: a
// listed object is gone, or the kernel reports the interruption.
func again[T any](ctx context.Context, read func() (T, error)) (v T, err error) {
	for range attempts {
		if err := ctx.Err(); err != nil {
			return v, err
		}
		if v, err = read(); !isAny(err, nfnetlink.ErrInterrupted, unix.EINTR, unix.ENOENT) {
			break
		}
	}
	return v, err
}

func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
}

// apply makes one attempt. With an error it returns the differences that still exist.
func (k *Kernel) apply(ctx context.Context, want nft.Ruleset, look Look) (Applied, error) {
	// Once a chain is ours, foreign rules in it are just drift.
	first := k.verified.want.Layout != want.Layout
	s, diffs, err := k.look(ctx, want, look, first)
	if err != nil || len(diffs) == 0 {
		return Applied{}, err
	}
	if err := s.wanted.Check(want, first); err != nil {
		return Applied{}, err
	}
	applied := Applied{Differences: diffs}
	if first {
		applied.Replaced = s.wanted.Replaces(want)
	}
	inFull := s.inFull()
	staged, err := s.wanted.Stage(ctx, want)
	if err != nil {
		return Applied{Differences: diffs}, err
	}
	expected := s.generation + staged.Transactions
	s, plan, generation, err := k.carryOut(s, func(since *state) (*state, error) {
		return k.read(ctx, want, Look{Others: true, TakeOver: look.TakeOver}, layout.Scope{Rules: true}, since)
	}, func(s *state) (*layout.Plan, error) { return s.plan(want, staged) })
	if err != nil {
		return Applied{Differences: diffs}, fmt.Errorf("apply: %w", err)
	}
	k.verified = verified{generation: generation, want: want, inFull: inFull, others: true}
	if s.generation != expected {
		k.verified.generation = 0 // another program wrote in between: read again
	}
	for _, h := range s.held {
		h.Verified(want, true, k.verified.generation)
	}
	for _, l := range s.legacy {
		applied.TookOver = append(applied.TookOver, l.String())
	}
	for _, left := range s.leftovers(want) {
		applied.Removed = append(applied.Removed, left.String())
	}
	applied.Removed = append(applied.Removed, k.reportEmptied(plan.Emptied)...)
	return applied, nil
}

// carryOut reads, plans and commits until no other program writes in between. What
// was read before, if anything, is read again only in part, and a plan is made again
// only if that has changed: for long lists, both take longer than the time between
// other programs' transactions. It returns the state that was planned for, and the
// generation after the plan.
func (k *Kernel) carryOut(since *state, read func(since *state) (*state, error), makePlan func(*state) (*layout.Plan, error)) (
	s *state, plan *layout.Plan, generation uint32, err error,
) {
	for range attempts {
		if s, err = read(since); err != nil {
			return nil, nil, 0, err
		}
		if plan == nil || !s.unchanged(since) {
			if plan, err = makePlan(s); err != nil {
				return nil, nil, 0, err
			}
		}
		generation, err = k.commit(plan, s.generation)
		switch {
		case errors.Is(err, unix.ERESTART):
			since = s
		case since != nil && perhapsOutdated(err):
			since, plan = nil, nil
		default:
			return s, plan, generation, err
		}
	}
	return s, plan, generation, err
}

// commit sends the transactions of a plan one after the other, each only if no other
// program has written since the generation. It returns the generation after them.
func (k *Kernel) commit(p *layout.Plan, generation uint32) (uint32, error) {
	for _, b := range []*nfnetlink.Batch{&p.Before, &p.Switch, &p.After} {
		if b.Len() == 0 {
			continue
		}
		if err := k.conn.Commit(b, generation); err != nil {
			return 0, err
		}
		generation++
	}
	return generation, nil
}

// look reads the kernel and compares. Another program's transaction can make a
// dump inconsistent without notice, so a difference counts only if there was none, or
// if two reads agree. At first, a chain with our text that an older agent wrote is
// a difference.
func (k *Kernel) look(ctx context.Context, want nft.Ruleset, l Look, first bool) (*state, []string, error) {
	generation, err := k.conn.Generation()
	if err != nil {
		return nil, nil, err
	}
	if generation == k.verified.generation && !l.Verify && !l.Full && k.verified.want.Same(want) && (k.verified.others || !l.Others) && !l.TakeOver {
		return nil, nil, nil
	}
	var since *state
	var last []string
	for try := range attempts {
		l.Full = l.Full && try < fullAttempts
		s, err := k.read(ctx, want, l, layout.Scope{}, since)
		// If a set or chain vanishes between listing and reading, the read is
		// inconsistent, too.
		if isAny(err, nfnetlink.ErrInterrupted, unix.EINTR, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		diffs := s.differences(want)
		if first {
			diffs = append(diffs, s.wanted.Unsigned(want)...)
		}
		if len(diffs) == 0 {
			if l.Quick {
				return s, nil, nil
			}
			unchanged := s.generation == k.verified.generation
			k.verified = verified{
				generation: s.generation, want: want, inFull: s.inFull(), others: l.Others || k.verified.others && unchanged,
			}
			for _, h := range s.held {
				h.Verified(want, false, s.generation)
			}
			return s, nil, nil
		}
		now, err := k.conn.Generation()
		if err != nil {
			return nil, nil, err
		}
		if now == s.generation || try > 0 && slices.Equal(diffs, last) {
			return s, diffs, nil
		}
		since, last = s, diffs
	}
	return nil, nil, nfnetlink.ErrInterrupted
}
