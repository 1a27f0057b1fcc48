package native

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
)

// A Reader reads our table. It implements [layout.Reader].
type Reader struct {
	conn, counters *nfnetlink.Conn
	// PerBatch is the most prefixes in a filling transaction.
	PerBatch int
	trust    map[string]trusted
	// When a set was last read, and how long that took.
	dumped   time.Time
	dumpCost time.Duration
}

// trusted is the content of a set when it was last filled or read.
type trusted struct {
	prefixes []netip.Prefix
	handle   uint64 // 0 until the set is seen again
}

// NewReader returns a reader that uses a connection.
func NewReader(c *nfnetlink.Conn) *Reader {
	return &Reader{conn: c, counters: c.Another(), PerBatch: largeBatch, trust: map[string]trusted{}}
}

// Mode implements [layout.Reader].
func (r *Reader) Mode() nft.Mode { return nft.ModeNFTables }

// Close implements [layout.Reader].
func (r *Reader) Close() error { return r.counters.Close() }

// Recreate implements [layout.Reader]. A map, an object or a chain that another
// program added may refer to something that must be deleted, or the flags of the
// table cannot be changed. The table is deleted only after a rehearsal shows that
// the kernel accepts the new one.
func (r *Reader) Recreate(_ context.Context, want nft.Ruleset) (gap time.Duration, err error) {
	if _, err := r.conn.Table(nfnetlink.Inet, nft.TableName); err != nil {
		return 0, errors.Join(layout.ErrNotPossible, err)
	}
	batches, rehearsal := Recreate(want.Tables[0], r.PerBatch)
	var refused *nfnetlink.RefusedError
	if err := r.conn.Commit(rehearsal, 0); !errors.As(err, &refused) || !refused.Last {
		return 0, errors.Join(layout.ErrNotPossible, err)
	}
	start := time.Now()
	clear(r.trust)
	for i, b := range batches {
		if err := r.conn.Commit(b, 0); err != nil {
			return 0, err
		}
		if i == 0 {
			if err := r.conn.Settle(); err != nil {
				return 0, err
			}
		}
	}
	return time.Since(start), nil
}

// ReadBack implements [layout.Reader].
func (r *Reader) ReadBack(context.Context, string, bool) (*layout.Found, error) {
	own, err := readWhole(r.conn)
	if err != nil || own == nil || own.empty() {
		return nil, err
	}
	found := own.ReadBack()
	return &found, nil
}

// Counters implements [layout.Reader]: it reads the named counters of the table,
// but no set.
func (r *Reader) Counters(nft.Layout) ([]nft.Counts, error) {
	objects, err := r.counters.Objects(nfnetlink.Inet, nft.TableName)
	if err != nil {
		if nfnetlink.IsNotExist(err) {
			return nil, nil
		}
		return nil, err
	}
	var out []nft.Counts
	for _, o := range objects {
		for _, f := range []nft.FamilyPolicy{{}, {IPv6: true}} {
			for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded} {
				if o.Name == string(v)+f.Suffix() {
					out = append(out, nft.Counts{IPv6: f.IPv6, Verdict: v, Packets: o.Packets})
				}
			}
		}
	}
	return out, nil
}

// held is our table in the kernel. It implements [layout.Held].
type held struct {
	*Reader
	own        *Own
	generation uint32 // at which it was read
	inFull     bool
}

// tableOf returns the wanted table, nil if another layout is wanted.
func tableOf(want nft.Ruleset) *nft.Table {
	if want.Layout != (Layout{}) || len(want.Tables) == 0 {
		return nil
	}
	return &want.Tables[0]
}

// Read implements [layout.Reader].
func (r *Reader) Read(ctx context.Context, want nft.Ruleset, s layout.Scope) (layout.Held, error) {
	own, err := ReadOwn(r.conn.In(ctx))
	if err != nil {
		return nil, err
	}
	h := &held{Reader: r, own: own, generation: s.Generation, inFull: true}
	if t := tableOf(want); t != nil && own != nil && !s.Rules {
		for _, w := range t.Sets {
			if err := h.readSides(r.conn.In(ctx), w, s); err != nil {
				return nil, err
			}
		}
	}
	return h, nil
}

// BigSet is the size from which on a set is not read on every change of the
// ruleset: the kernel walks a set from the start for every page of a dump.
const BigSet = 10_000

// readSides reads the elements of a wanted set, under both names if both exist.
func (h *held) readSides(c *nfnetlink.Conn, w nft.Set, s layout.Scope) error {
	for _, side := range []string{nft.SideA, nft.SideB} {
		set, ok := h.own.Sets[w.Name+side]
		if !ok {
			continue
		}
		if w.Mappings != nil || w.Learned { // short, and an element can change its value alone
			if err := set.readElements(c, w.Len()+slack); err != nil {
				return err
			}
			continue
		}
		known := s.Unchanged && (s.InFull || !s.Full)
		if known || (s.Quick || max(len(w.Prefixes), int(set.Count)) > BigSet) && !s.Full {
			h.inFull = h.inFull && (known && s.InFull)
			remembered, err := h.remembers(set, w, known, s)
			if err != nil {
				return err
			}
			if remembered {
				continue
			}
			if set.Counted && int(set.Count) != len(w.Prefixes) {
				// Difference enough. Reading would take so long that a program which
				// commits often outdates it each time.
				h.inFull = false
				continue
			}
		}
		start := time.Now()
		err := set.readElements(c, len(w.Prefixes)+slack)
		// Even if other programs' transactions interrupted the reading, which
		// cost as much.
		h.dumped, h.dumpCost = time.Now(), time.Since(start)
		if err != nil {
			return err
		}
		if set.equals(w) {
			h.trust[set.Name] = trusted{prefixes: w.Prefixes, handle: set.Handle}
		}
	}
	return nil
}

// remembers reports whether the elements of a set need not be read: the ruleset
// has not changed since, or it is the same set, with the same number of elements,
// and none for addresses between them. Kernels before 6.18 do not report the
// number; there the set is read occasionally, so that reading takes no more than
// 1 % of a CPU.
func (r *Reader) remembers(held *heldSet, w nft.Set, known bool, s layout.Scope) (bool, error) {
	t, ok := r.trust[held.Name]
	switch {
	case !ok || t.handle != 0 && t.handle != held.Handle:
		return false, nil
	case known:
	case held.Counted && int(held.Count) != len(t.prefixes):
		return false, nil
	case !held.Counted && !s.Quick && time.Since(r.dumped) > 100*r.dumpCost:
		return false, nil
	default:
		for _, a := range probes(t.prefixes) {
			if has, _, err := r.conn.HasElement(held.Family, held.Table, held.Name, a); has || err != nil {
				return false, err
			}
		}
	}
	t.handle = held.Handle
	r.trust[held.Name] = t
	if held.Trusted = slices.Equal(t.prefixes, w.Prefixes); !held.Trusted {
		held.Read = true
		for _, p := range t.prefixes {
			held.Holds = append(held.Holds, iprange.Of(p))
		}
	}
	return true, nil
}

// probes returns addresses that the sorted prefixes do not contain: some directly
// after one of them, the last address of all, and the zero address for the
// element *, which is not counted. A single element cannot cover many addresses
// without covering one of these, unless it is within a gap.
func probes(prefixes []netip.Prefix) []netip.Addr {
	const many = 8
	out := []netip.Addr{{}}
	if len(prefixes) == 0 {
		return out
	}
	for i := range many {
		at := i * len(prefixes) / many
		after := iprange.Of(prefixes[at]).To.Next()
		if after.IsValid() && (at+1 == len(prefixes) || !prefixes[at+1].Contains(after)) {
			out = append(out, after)
		}
	}
	for _, end := range []netip.Addr{first(prefixes[0].Addr()), iprange.Of(netip.PrefixFrom(prefixes[0].Addr(), 0)).To} {
		if !prefixes[0].Contains(end) && !prefixes[len(prefixes)-1].Contains(end) {
			out = append(out, end)
		}
	}
	return out
}

// first returns the first address of a family.
func first(a netip.Addr) netip.Addr { return netip.PrefixFrom(a, 0).Masked().Addr() }

func (h *held) InFull() bool { return h.inFull }

func (h *held) Differences(want nft.Ruleset) []string { return h.own.Differences(want.Tables[0]) }

// Unsigned implements [layout.Held]: no other program writes such a table.
func (h *held) Unsigned(nft.Ruleset) []string { return nil }

func (h *held) Leftovers(want nft.Ruleset) []layout.Leftover {
	if h.own == nil || tableOf(want) != nil {
		return nil
	}
	return []layout.Leftover{{Name: "table inet " + nft.TableName, Mode: nft.ModeNFTables}}
}

func (h *held) Check(nft.Ruleset, bool) error { return nil }

func (h *held) Replaces(nft.Ruleset) []foreign.LegacyChain { return nil }

func (h *held) Owns(nft.Ruleset) func(nfnetlink.Chain) bool {
	return func(c nfnetlink.Chain) bool { return c.Family == nfnetlink.Inet && c.Table == nft.TableName }
}

// Plan implements [layout.Held]. If another layout is wanted, our table is
// deleted in a later transaction: otherwise a packet that has passed the still
// empty iptables chain could reach our own chain when it is empty already,
// because each base chain determines separately which rules are current. Until
// then both layouts apply, with the old verdict or the new one. In the other
// direction, a packet reaches the chain that is emptied first, and sees both or
// one, never neither.
func (h *held) Plan(want nft.Ruleset, staged layout.Staged, p *layout.Plan) error {
	t := tableOf(want)
	switch {
	case t != nil && !h.own.Holds(staged.Handles):
		return layout.ErrOutdated
	case t != nil:
		Flip(&p.Switch, *t, staged.Sides, h.own)
	case h.own == nil:
	case len(want.Tables) == 0:
		p.Switch.DelTable(h.own.Family, h.own.Name)
	default:
		p.After.DelTable(h.own.Family, h.own.Name)
	}
	return nil
}

// Unchanged implements [layout.Held].
func (h *held) Unchanged(since layout.Held) bool { return h.own.unchanged(since.(*held).own) }

// Verified implements [layout.Held]: Read and Stage have recorded what can be trusted.
func (h *held) Verified(nft.Ruleset, bool, uint32) {}

// Stage implements [layout.Held]: it fills the sets that will be activated.
// Another agent may do the same: the first transaction is sent only if the table is
// still what was read, the others only if the sets are those that the first one
// created.
func (h *held) Stage(ctx context.Context, want nft.Ruleset) (layout.Staged, error) {
	if h.own.untracked() {
		return layout.Staged{}, layout.ErrBroken
	}
	batches, target := Stage(&nfnetlink.Batch{}, want.Tables[0], h.own, h.PerBatch)
	out := layout.Staged{Sides: target, Handles: map[string]uint64{}, Transactions: uint32(len(batches))}
	if h.own != nil {
		for _, name := range target {
			if set, ok := h.own.Sets[name]; ok {
				out.Handles[name] = set.Handle
			}
		}
	}
	for i, b := range batches {
		if err := ctx.Err(); err != nil {
			return layout.Staged{}, err
		}
		generation, still := uint32(0), func() error { return h.stillOurs(out.Handles) }
		if i == 0 {
			generation, still = h.generation, h.stillHeld
		}
		err := h.fill(b, generation, still)
		if errors.Is(err, unix.EMSGSIZE) && h.PerBatch > SmallBatch {
			h.PerBatch = SmallBatch // the send buffer is small: retry
			return layout.Staged{}, layout.ErrOutdated
		}
		if err != nil {
			return layout.Staged{}, fmt.Errorf("fill sets: %w", err)
		}
		if i == 0 {
			maps.Copy(out.Handles, b.Handles)
		}
	}
	for _, w := range want.Tables[0].Sets {
		name := target[w.Name]
		if known, ok := h.trust[name]; !ok || !slices.Equal(known.prefixes, w.Prefixes) || known.handle != out.Handles[name] {
			h.trust[name] = trusted{prefixes: w.Prefixes, handle: out.Handles[name]}
		}
	}
	return out, nil
}

// fillAttempts is the number of attempts to fill a set while other programs
// write.
const fillAttempts = 20

// fill sends one filling transaction, at a generation or, if that is 0 or outdated,
// when no other program writes between the check of what it is based on and it.
func (r *Reader) fill(b *nfnetlink.Batch, generation uint32, still func() error) (err error) {
	for range fillAttempts {
		if generation == 0 {
			if generation, err = r.conn.Generation(); err != nil {
				return err
			}
			if err = still(); err != nil {
				return err
			}
		}
		if err = r.conn.Commit(b, generation); !errors.Is(err, unix.ERESTART) {
			return err
		}
		generation = 0
	}
	return err
}

// stillHeld returns an error if the table has changed since it was read, except for
// elements of sets.
func (h *held) stillHeld() error {
	now, err := ReadOwn(h.conn)
	if err == nil && !now.unchanged(h.own) {
		err = layout.ErrOutdated
	}
	return err
}

// stillOurs reports whether the sets still have these handles.
func (r *Reader) stillOurs(handles map[string]uint64) error {
	sets, err := r.conn.Sets(nfnetlink.Inet, nft.TableName)
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
		return layout.ErrOutdated
	}
	return nil
}
