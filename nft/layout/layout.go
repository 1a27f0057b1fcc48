// Package layout is what the loop of package kernel needs from a mode: the loop reads
// every layout, asks each for differences and for a plan, and so repairs the layout
// that is wanted and removes the other without knowing which is which.
package layout

import (
	"context"
	"errors"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
)

// A Reader reads what the kernel holds of one layout. It remembers what lets it read
// less the next time.
type Reader interface {
	// Read reads what the kernel holds, as much as the wanted ruleset and the scope
	// need.
	Read(ctx context.Context, want nft.Ruleset, s Scope) (Held, error)
	// ReadBack reads the ruleset that the kernel holds. The chain is where ours would
	// be if it is not found by its signature; with alike it need not be ours: an older
	// agent may have written it. It returns nil if there is nothing.
	ReadBack(ctx context.Context, chain string, alike bool) (*Found, error)
	// Counters reads how many connections went which way, over a connection of its own.
	// It returns nil if the layout is another one.
	Counters(l nft.Layout) ([]nft.Counts, error)
	// Large reports whether the wanted ruleset takes longer to read than others leave
	// between their transactions.
	Large(want nft.Ruleset) bool
	// Rewrite writes what changed without reading it, for when others' transactions do
	// not let us read to the end. It returns the differences that it repaired.
	Rewrite(ctx context.Context, want nft.Ruleset) ([]string, error)
	// Recreate deletes the table and creates it again, for when it cannot be repaired
	// in place. It returns for how long no rules decided.
	Recreate(ctx context.Context, want nft.Ruleset) (gap time.Duration, err error)
	// Close closes the connection of the counters.
	Close() error
}

// ErrNotPossible says that a layout cannot do what it was asked for. Nothing was
// changed.
var ErrNotPossible = errors.New("not possible in this mode, or for this table")

// A Scope says how closely a Reader reads.
type Scope struct {
	Full   bool // element by element, even what is large and has the right count
	Quick  bool // what was found right is unchanged if it is the same and as long
	Others bool // also chains of ours under any name
	Rules  bool // no elements of sets
	Fresh  bool // nothing from memory: rules with what they count are to be written
	// What was found right before: Same if it is what is wanted, Unchanged if nobody has
	// written since, InFull if nothing of it was taken on trust.
	Same, Unchanged, InFull bool
	// Generation of the ruleset, as it was before reading.
	Generation uint32
}

// Held is what the kernel holds of one layout. All methods take the wanted ruleset,
// which may be of another layout.
type Held interface {
	// Differences returns in words how it is not the wanted ruleset.
	Differences(want nft.Ruleset) []string
	// Unsigned names chains of ours that an older agent, or an older version, wrote.
	Unsigned(want nft.Ruleset) []string
	// Leftovers returns what is ours and not wanted.
	Leftovers(want nft.Ruleset) []Leftover
	// InFull reports whether nothing was taken on trust.
	InFull() bool
	// Check says why the wanted ruleset cannot be written: because of what others have
	// done, and, if it is the first one, because its place is taken.
	Check(want nft.Ruleset, first bool) error
	// Replaces returns the rules of other agents that stand where ours will.
	Replaces(want nft.Ruleset) []foreign.LegacyChain
	// Owns reports whether a chain is ours or, in the wanted ruleset, will be.
	Owns(want nft.Ruleset) func(nfnetlink.Chain) bool
	// Stage writes what no rule refers to yet.
	Stage(ctx context.Context, want nft.Ruleset) (Staged, error)
	// Plan plans how it becomes the wanted ruleset, or goes.
	Plan(want nft.Ruleset, staged Staged, p *Plan) error
	// Right says that no differences were found.
	Right()
	// Written says that what was planned has been committed, which led to a generation.
	Written(want nft.Ruleset, generation uint32)
}

// Staged is what was staged.
type Staged struct {
	Transactions uint32
	Sides        nft.Sides
	Handles      map[string]uint64 // of the sets
}

// ErrOutdated says that what was staged is no longer there, or is to be staged in
// another way.
var ErrOutdated = errors.New("the ruleset changed while it was being written")

// A Plan is transactions. What packets see changes in Switch.
type Plan struct {
	Before, Switch, After nfnetlink.Batch
	// Emptied are chains that cannot be deleted because others refer to them.
	Emptied []ChainID
	// Shared says that rules in tables of others are written.
	Shared bool
}

// Batches returns the transactions that are not empty.
func (p *Plan) Batches() (batches []*nfnetlink.Batch) {
	for _, b := range []*nfnetlink.Batch{&p.Before, &p.Switch, &p.After} {
		if b.Len() > 0 {
			batches = append(batches, b)
		}
	}
	return batches
}

// A ChainID names a chain of a table.
type ChainID struct {
	Family       nfnetlink.Family
	Table, Chain string
}

// A Leftover is something of ours that is not wanted.
type Leftover struct {
	Name  string
	Mode  nft.Mode
	Place string // " in …", if the name does not say it
}

// String names it with the mode that left it.
func (l Leftover) String() string { return l.Name + " of mode " + string(l.Mode) + l.Place }

// Found is a ruleset that was read back.
type Found struct {
	nft.Ruleset
	// Ours reports whether this version could have written it, and nobody has changed
	// what it decides since.
	Ours bool
	// Exact reports whether the kernel decides as the policy does, whoever wrote it.
	Exact bool
}
