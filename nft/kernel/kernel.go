package kernel

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
	"nft-masq-agent/nft/xtables"
)

// A Kernel is the ruleset of a network namespace. It is safe for concurrent use.
type Kernel struct {
	mu   sync.Mutex
	conn *nfnetlink.Conn
	// xtables reads legacy ip_tables of the process's namespace.
	xtables func() ([]foreign.XTChain, error)
	seen    memory
	wide    bool // rules of others were looked for since the last Forget
	// What was found in step, and the generation of the ruleset in which.
	// While the kernel is at that generation nothing need be read.
	inStep nft.Ruleset
	at     uint32
	full   bool            // no big set was taken on trust
	jumps  [2]xtables.Jump // of mode iptables-nft, for IPv4 and IPv6
	marks  [2]xtables.Trust
	others bool // nothing is left of the other mode
	trust  map[string]trusted
	// When a set was last read, and what that cost.
	dumped   time.Time
	dumpCost time.Duration
	// The same of the chains of mode iptables-nft.
	chainsRead time.Time
	chainsCost time.Duration
	// Counters are read over a connection and under a lock of their own: a scrape does
	// not wait while sets are read or filled.
	countMu   sync.Mutex
	countConn *nfnetlink.Conn
	counts    cachedCounts
	tallies   tallies
	perBatch  int // most prefixes in a filling transaction
	bigChain  int // CIDRs from which chains of mode iptables-nft are not read at each change
}

// trusted is what a set held when it was last filled or read.
type trusted struct {
	prefixes []netip.Prefix
	handle   uint64 // 0 until the set is seen again
}

// Open gives the ruleset of the network namespace in which its first request is
// made. Without CAP_NET_ADMIN, or without nf_tables, each request fails.
func Open() *Kernel {
	k := New(nfnetlink.Dial())
	k.xtables = func() ([]foreign.XTChain, error) { return foreign.LegacyChains("/proc/thread-self/net") }
	return k
}

// New uses a connection of its caller.
func New(c *nfnetlink.Conn) *Kernel {
	return &Kernel{
		xtables: func() ([]foreign.XTChain, error) { return nil, nil },
		conn:    c, countConn: c.Another(), seen: memory{Conn: c}, trust: map[string]trusted{}, perBatch: native.LargeBatch, bigChain: bigChain,
	}
}

// Forget drops the rules of others that Apply and Others have read, and says
// whether they were many. Until then Others does not read again what Apply read.
func (k *Kernel) Forget() (many bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	many = k.wide && k.seen.read >= manyRules
	k.seen.read, k.wide = 0, false
	k.seen.forget()
	return many
}

// Close closes the connection; the rules stay.
func (k *Kernel) Close() error { return errors.Join(k.conn.Close(), k.countConn.Close()) }

// PortID gives the netlink port by which notifications name this connection.
func (k *Kernel) PortID() uint32 { return k.conn.PortID() }

// A Look says how closely the kernel is read.
type Look struct {
	// Full reads sets of over 10,000 CIDRs element by element even where
	// their count is right.
	Full bool
	// Verify reads our table and chains, without the elements of their sets, even where
	// the generation of the ruleset is that of the last read: a table that a process
	// owns goes with its socket and leaves the generation as it was. Full does so too.
	Verify bool
	// Quick takes sets and chains that were found right for unchanged if they are the
	// same ones and as long, whatever their size. What it finds is known to be wrong;
	// that it finds nothing says little, and the next look reads as if it had not been.
	// It takes less than a millisecond in either mode, also with 100,000 CIDRs.
	Quick bool
	// Others also finds what the other mode installed.
	Others bool
	// TakeOver also finds the rules of iptables-based agents, which Apply then
	// removes in the transaction that makes ours effective.
	TakeOver bool
}

// Diff says in words how the kernel is not as wanted; nothing where it is. It
// writes nothing.
func (k *Kernel) Diff(want nft.Ruleset, look Look) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, diffs, err := k.look(want, look, false)
	return diffs, err
}

// Applied says what [Kernel.Apply] did.
type Applied struct {
	// Differences are those that were found and are no more; none where
	// nothing was written.
	Differences []string
	// TookOver names the chains of other agents that were removed, Removed what
	// another mode or chain name of ours had installed.
	TookOver, Removed []string
	// Replaced are the rules of other agents that stood in the chain of mode
	// iptables-nft.
	Replaced []foreign.LegacyChain
	// Generation of the ruleset that was found or made so; 0 if somebody else
	// wrote meanwhile.
	Generation uint32
	// Recreated is how long no rules of ours decided, because our table could not be
	// repaired in place and was deleted and made anew; 0 if it was not.
	Recreated time.Duration
	Took      time.Duration
}

// How often is tried again when somebody else changed the ruleset meanwhile,
// and when the kernel's answer may come from that, but may as well be that it
// lacks something.
const (
	attempts    = 20
	fewAttempts = 3
)

// Apply brings the kernel to what is wanted, and writes only where it differs.
// What packets see changes in one transaction; when that is refused the old
// rules stay, and the error holds the kernel's errno.
func (k *Kernel) Apply(want nft.Ruleset, look Look) (Applied, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	start := time.Now()
	refused := 0
	var found []string
	for try := 1; ; try++ {
		k.seen.forget()
		a, err := k.apply(want, look)
		if err == nil {
			a.Generation, a.Took = k.at, time.Since(start)
			return a, nil
		}
		k.at = 0
		if !outdated(err) {
			refused++
		}
		if len(found) == 0 {
			found = a.Differences
		}
		if outdated(err) && want.Mode() == nft.ModeIPTables && k.inStep.Same(want) && !look.Others && !look.TakeOver {
			if a, rewriteErr := k.rewrite(want); rewriteErr == nil {
				a.Took = time.Since(start)
				return a, nil
			}
		}
		if refused == 2 && mayComeFromTheTable(err) {
			if a, recreateErr := k.recreate(want, look); recreateErr == nil {
				a.Differences, a.Generation, a.Took = found, k.at, time.Since(start)
				return a, nil
			}
		}
		if try >= attempts || refused >= 1 && !mayComeFromTheTable(err) || refused >= fewAttempts {
			return Applied{}, err
		}
		// Two agents that fill the same sets would else take them from each
		// other for ever. Each try begins anew: meanwhile others may use k.
		k.mu.Unlock()
		time.Sleep(rand.N(time.Duration(try) * time.Millisecond))
		k.mu.Lock()
	}
}

// mayComeFromTheTable reports whether a refusal may come from what somebody has put
// into our table, or did to it in between, rather than from what we lack.
func mayComeFromTheTable(err error) bool {
	var refused *nfnetlink.RefusedError
	return perhapsOutdated(err) || errors.As(err, &refused) && !isAny(err, unix.EPERM, unix.EACCES, unix.ENOMEM, unix.EMSGSIZE)
}

// rewrite makes the chains of mode iptables-nft right, which others' transactions do not
// let us read to their end: those that have changed, as far as their heads tell, are
// written anew, whatever is written in between.
func (k *Kernel) rewrite(want nft.Ruleset) (Applied, error) {
	s := &state{readAll: true}
	for i, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		n, err := xtables.ReadShared(&k.seen, f, xtables.WithSubchains(want.Chain()), xtables.Reading{Trust: k.marks[i], Heads: true})
		if err != nil {
			return Applied{}, err
		}
		s.nat = append(s.nat, n)
	}
	diffs := s.differences(want)
	if len(diffs) == 0 {
		return Applied{}, nil
	}
	for _, b := range s.transactions(want, nil) {
		if err := k.conn.Commit(b, 0); err != nil {
			return Applied{}, err
		}
	}
	k.marks, k.at = [2]xtables.Trust{}, 0
	for i, n := range s.nat {
		if natTable(want, n.Family) != nil {
			k.marks[i] = n.MarksOf(k.conn, want.Chain())
		}
	}
	k.chainsRead = time.Now()
	return Applied{Differences: diffs}, nil
}

// errNotRecreated says that our table was left as it was.
var errNotRecreated = errors.New("the table is not recreated")

// recreate deletes our table and makes it anew, when it could not be repaired in
// place: a map, an object or a chain that somebody put there may hold what has to go, or
// its flags may not be changed. It does so only if the kernel takes all that is to be
// made, which is tried before.
func (k *Kernel) recreate(want nft.Ruleset, look Look) (Applied, error) {
	if want.Mode() != nft.ModeNFTables {
		return Applied{}, errNotRecreated
	}
	s, err := again(func() (*state, error) { return k.readRules(want, Look{}) })
	if err != nil {
		return Applied{}, err
	}
	if s.own == nil {
		return Applied{}, errNotRecreated
	}
	batches, rehearsal := native.Recreate(want.Tables[0], k.perBatch)
	var refused *nfnetlink.RefusedError
	if err := k.conn.Commit(rehearsal, 0); !errors.As(err, &refused) || !refused.Last {
		return Applied{}, errors.Join(errNotRecreated, err)
	}
	start := time.Now()
	clear(k.trust)
	for _, b := range batches {
		if err := k.conn.Commit(b, 0); err != nil {
			return Applied{}, err
		}
	}
	gap := time.Since(start)
	// What is left of others is removed in the usual way.
	a, err := k.apply(want, look)
	a.Recreated = gap
	return a, err
}

// ErrForeignChain says that the chain of mode iptables-nft is somebody else's.
var ErrForeignChain = errors.New("the chain holds rules that no masquerade agent wrote")

// ErrForeignPostrouting says that iptables could not use a chain POSTROUTING, and
// neither can mode iptables-nft: its hook is not the one that iptables gives it.
var ErrForeignPostrouting = errors.New("iptables cannot use it")

// CheckChain gives [ErrForeignChain] where mode iptables-nft could not use the
// chain without deleting somebody else's rules.
func (k *Kernel) CheckChain(chain string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	s, err := k.readRules(nft.Ruleset{Layout: xtables.Layout{Name: chain}}, Look{})
	if err != nil {
		return err
	}
	return s.checkChain(chain)
}

// checkPostrouting gives [ErrForeignPostrouting] where a jump that is wanted would
// stand in a chain that iptables does not know.
func (s *state) checkPostrouting(want nft.Ruleset) error {
	for _, t := range want.Tables {
		if t.Name != xtables.NATTable {
			continue
		}
		if wrong := s.shared(t.Family).WrongHook(); wrong != "" {
			return fmt.Errorf("%s: %w; move its rules and run nft delete chain %s %s %s, or use mode %s",
				wrong, ErrForeignPostrouting, t.Family, xtables.NATTable, xtables.Postrouting, nft.ModeNFTables)
		}
	}
	return nil
}

func (s *state) checkChain(chain string) error {
	for _, n := range s.nat {
		if n.Foreign(chain) {
			return fmt.Errorf("chain %q in table %s nat: %w", chain, n.Family, ErrForeignChain)
		}
	}
	return nil
}

// replaced gives the rules of other agents in the chain of ours.
func (s *state) replaced(chain string) (found []foreign.LegacyChain) {
	for _, n := range s.nat {
		rules, jumps := n.Strange(chain)
		if len(rules) == 0 {
			continue
		}
		found = append(found, foreign.LegacyChain{
			Family: n.Family, Table: xtables.NATTable, Name: chain, Jumps: jumps, Rules: len(rules),
			RandomFully: slices.ContainsFunc(rules, func(r nfnetlink.Rule) bool { return slices.ContainsFunc(r.Exprs, ruletext.RandomFully) }),
		})
	}
	return found
}

// errOutdated says that what was staged is no longer there, or is to be staged
// in another way.
var errOutdated = errors.New("the ruleset changed while it was being written")

// outdated says that an error comes from a change by somebody else between
// reading and writing, or that the outcome is not known: read again.
func outdated(err error) bool {
	return isAny(err, errOutdated, nfnetlink.ErrInterrupted, unix.ERESTART, unix.ENOBUFS, unix.EINTR)
}

// perhapsOutdated says that an error can come from a change by somebody else.
func perhapsOutdated(err error) bool { return isAny(err, unix.ENOENT, unix.EBUSY, unix.EEXIST) }

// again repeats a read that somebody else's transaction tore: what was listed is
// gone, or the kernel says so.
func again[T any](read func() (T, error)) (v T, err error) {
	for range attempts {
		if v, err = read(); !isAny(err, nfnetlink.ErrInterrupted, unix.EINTR, unix.ENOENT) {
			break
		}
	}
	return v, err
}

func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
}

// apply tries once. With an error it returns the differences that are still there.
func (k *Kernel) apply(want nft.Ruleset, look Look) (Applied, error) {
	// Once the chain is ours, foreign rules alone in it are only drift.
	first := want.Mode() == nft.ModeIPTables && k.inStep.Chain() != want.Chain()
	s, diffs, err := k.look(want, look, first)
	if err != nil || len(diffs) == 0 {
		return Applied{}, err
	}
	var replaced []foreign.LegacyChain
	if first {
		if err := s.checkChain(want.Chain()); err != nil {
			return Applied{}, err
		}
		replaced = s.replaced(want.Chain())
	}
	if err := s.checkPostrouting(want); err != nil {
		return Applied{}, err
	}
	applied := Applied{Differences: diffs, Replaced: replaced}
	readAll := s.readAll
	var staged staged
	if want.Mode() == nft.ModeNFTables {
		if staged, err = k.stage(want.Tables[0], s); err != nil {
			return Applied{Differences: diffs}, err
		}
	}
	expected := s.generation + staged.commits
	k.seen.wrote(s.generation, staged.commits)
	for range k.reads(want, look) {
		if want.Mode() == nft.ModeIPTables {
			k.seen.forget() // what its rules have counted is put back
		}
		if s, err = k.readRules(want, Look{Others: true, TakeOver: look.TakeOver}); err != nil {
			return Applied{}, err
		}
		if want.Mode() == nft.ModeNFTables && !s.own.Holds(staged.handles) {
			return Applied{}, errOutdated
		}
		batches := s.transactions(want, staged.sides)
		if err = k.commit(batches, s.generation); err == nil {
			commits := uint32(len(batches))
			k.inStep, k.at, k.full, k.others = want, s.generation+commits, readAll, true
			if s.generation != expected {
				k.at = 0 // somebody else wrote in between: look again
			}
			if want.Mode() == nft.ModeIPTables {
				k.markWritten(s, want)
			}
			for _, l := range s.legacy {
				applied.TookOver = append(applied.TookOver, l.String())
			}
			applied.Removed = s.unwanted(want)
			if want.Mode() == nft.ModeNFTables && len(s.legacy)+len(applied.Removed) == 0 {
				k.seen.wrote(s.generation, commits)
			}
			applied.Removed = append(applied.Removed, k.sayHeld(s.held(want))...)
			return applied, nil
		}
		if !errors.Is(err, unix.ERESTART) {
			break
		}
	}
	return Applied{Differences: diffs}, fmt.Errorf("apply: %w", err)
}

// commit sends transactions one after the other, each only if nobody else has
// written since the generation.
func (k *Kernel) commit(batches []*nfnetlink.Batch, generation uint32) error {
	for i, b := range batches {
		if err := k.conn.Commit(b, generation+uint32(i)); err != nil {
			return err
		}
	}
	return nil
}

// staged says under which names the wanted sets are held, which sets these are,
// and how many transactions it took.
type staged struct {
	sides   nft.Sides
	handles map[string]uint64
	commits uint32
}

// stage fills the sets that are to become effective. Another agent may be at the
// same: each transaction is made only if the sets are still those that the first
// one made.
func (k *Kernel) stage(want nft.Table, s *state) (staged, error) {
	batches, target := native.Stage(want, s.own, k.perBatch)
	out := staged{sides: target, handles: map[string]uint64{}, commits: uint32(len(batches))}
	if s.own != nil {
		for _, name := range target {
			if held, ok := s.own.Sets[name]; ok {
				out.handles[name] = held.Handle
			}
		}
	}
	for i, b := range batches {
		err := k.fill(b, i == 0, s.generation, out.handles)
		if errors.Is(err, unix.EMSGSIZE) && k.perBatch > native.SmallBatch {
			k.perBatch = native.SmallBatch // the send buffer is small: again
			return staged{}, errOutdated
		}
		if err != nil {
			return staged{}, fmt.Errorf("fill sets: %w", err)
		}
	}
	for _, w := range want.Sets {
		name := target[w.Name]
		if t, ok := k.trust[name]; !ok || !slices.Equal(t.prefixes, w.Prefixes) || t.handle != out.handles[name] {
			k.trust[name] = trusted{prefixes: w.Prefixes, handle: out.handles[name]}
		}
	}
	return out, nil
}

// fill makes one filling transaction. The first makes the sets, at the
// generation at which they were planned; the others wait until nobody writes in
// between.
func (k *Kernel) fill(b *nfnetlink.Batch, first bool, planned uint32, handles map[string]uint64) error {
	if first {
		if err := k.conn.Commit(b, planned); err != nil {
			return err
		}
		maps.Copy(handles, b.Handles)
		return nil
	}
	for range attempts {
		generation, err := k.conn.Generation()
		if err != nil {
			return err
		}
		if err := k.stillOurs(handles); err != nil {
			return err
		}
		if err = k.conn.Commit(b, generation); !errors.Is(err, unix.ERESTART) {
			return err
		}
	}
	return errOutdated
}

// stillOurs says whether the sets are still those of these handles.
func (k *Kernel) stillOurs(handles map[string]uint64) error {
	sets, err := k.conn.Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		return err
	}
	found := 0
	for _, s := range sets {
		if h, ok := handles[s.Name]; ok && h == s.Handle {
			found++
		}
	}
	if found < len(handles) {
		return errOutdated
	}
	return nil
}

// reads returns how often reading is tried while others write. A large chain takes longer
// to read than they leave, and is written anew then.
func (k *Kernel) reads(want nft.Ruleset, l Look) int {
	if v4, v6 := want.CIDRs(); want.Mode() == nft.ModeIPTables && v4+v6 > k.bigChain && !l.Others && !l.TakeOver && k.inStep.Same(want) {
		return 2
	}
	return attempts
}

// look reads the kernel and compares. A dump can be torn by somebody else's
// transaction without a sign, so a difference counts only when two reads agree. With
// sign a chain that an older agent wrote in our words is a difference.
func (k *Kernel) look(want nft.Ruleset, l Look, sign bool) (*state, []string, error) {
	generation, err := k.conn.Generation()
	if err != nil {
		return nil, nil, err
	}
	if generation == k.at && !l.Verify && !l.Full && k.inStep.Same(want) && (k.others || !l.Others) && !l.TakeOver {
		return nil, nil, nil
	}
	var last []string
	for try := range k.reads(want, l) {
		s, err := k.read(want, l)
		// A set or chain that vanished between listing and reading is a torn
		// read too.
		if isAny(err, nfnetlink.ErrInterrupted, unix.EINTR, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		diffs := s.differences(want)
		if sign {
			diffs = append(diffs, s.unsigned(want)...)
		}
		if len(diffs) == 0 {
			if l.Quick {
				return s, nil, nil
			}
			full := s.readAll && (!s.trusted || k.full && s.generation == k.at)
			k.inStep, k.at, k.full, k.others = want, s.generation, full, l.Others || k.others && s.generation == k.at
			k.markChains(s)
			return s, nil, nil
		}
		if s.generation == k.at || try > 0 && slices.Equal(diffs, last) {
			return s, diffs, nil
		}
		last = diffs
	}
	return nil, nil, nfnetlink.ErrInterrupted
}
