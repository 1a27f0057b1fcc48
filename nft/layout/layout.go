// Package layout defines what the loop of package kernel needs from a mode: the loop
// reads every layout and asks each for its differences and its plan, so it repairs the
// wanted layout and removes the other one without knowing which is which.
package layout

import (
	"context"
	"errors"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
)

// A Reader reads what the kernel has of one layout. It caches what lets it read less the
// next time.
type Reader interface {
	// Mode returns the name of the layout.
	Mode() nft.Mode
	// Read reads as much as the wanted ruleset and the scope require.
	Read(ctx context.Context, want nft.Ruleset, s Scope) (Held, error)
	// ReadBack decompiles what the kernel has, and returns nil if there is nothing. A
	// chain of ours is found by its signature, or else by the given name. If alike is
	// set, the chain may be one that an older agent wrote.
	ReadBack(ctx context.Context, chain string, alike bool) (*Found, error)
	// Counters reads the number of connections by verdict, over a separate
	// connection; nothing if there are no rules. It may be called at any time. Like
	// the methods that follow, it is for the layout of this reader.
	Counters(l nft.Layout) ([]nft.Counts, error)
	// Recreate deletes the table and creates it again, for when it cannot be repaired
	// in place. It returns how long no rules were in effect.
	Recreate(ctx context.Context, want nft.Ruleset) (gap time.Duration, err error)
	// Close closes the counters' connection.
	Close() error
}

// ErrNotPossible means that a layout does not support an operation. Nothing was changed.
var ErrNotPossible = errors.New("not possible in this mode, or for this table")

// A Scope is how closely a Reader reads.
type Scope struct {
	Full   bool // element by element, even if the count is right
	Quick  bool // what was in sync counts as unchanged if its handle and length are the same
	Others bool // also chains of ours under any name
	Rules  bool // no elements of sets
	Owners bool // only what [Held.Owns] needs
	// About the last check that found everything in sync: it was for the Same ruleset,
	// the generation is Unchanged since, and it was InFull: nothing was taken on trust.
	Same, Unchanged, InFull bool
	// Generation of the ruleset before the read.
	Generation uint32
	// Since is what was read before, nil if nothing was. Of long chains, those that
	// have the same handle and length since then need not be read again.
	Since Held
}

// Held is what the kernel has of one layout.
type Held interface {
	// Differences describes how it differs from the wanted ruleset. This and the next
	// four methods are for a ruleset of this layout, the others for any.
	Differences(want nft.Ruleset) []string
	// Unsigned describes chains of ours that an older agent, or an older version, wrote.
	Unsigned(want nft.Ruleset) []string
	// Check returns an error if other programs' changes prevent writing the wanted
	// ruleset or, for the first one, if its chain belongs to another program.
	Check(want nft.Ruleset, first bool) error
	// Replaces returns rules of other agents that the wanted ruleset replaces.
	Replaces(want nft.Ruleset) []foreign.LegacyChain
	// Stage writes everything that no rule refers to yet.
	Stage(ctx context.Context, want nft.Ruleset) (Staged, error)
	// Leftovers returns what is ours but not wanted.
	Leftovers(want nft.Ruleset) []Leftover
	// InFull reports whether everything was read.
	InFull() bool
	// Owns returns a function that reports whether a chain is ours or will be.
	Owns(want nft.Ruleset) func(nfnetlink.Chain) bool
	// Plan adds the transactions that turn it into the wanted ruleset, or remove it.
	Plan(want nft.Ruleset, staged Staged, p *Plan) error
	// Unchanged reports whether a plan for what was read before, in the same scope, is
	// still right.
	Unchanged(since Held) bool
	// Verified is called if there were no differences, or after the plan was committed,
	// with the generation since.
	Verified(want nft.Ruleset, wrote bool, generation uint32)
}

// Staged is the result of [Held.Stage].
type Staged struct {
	Transactions uint32
	Sides        nft.Sides
	Handles      map[string]uint64 // of the sets
}

// ErrBroken means that the table must be created again, even if the kernel would accept
// a repair in place.
var ErrBroken = errors.New("the table cannot be repaired in place")

// ErrOutdated means that what was staged is gone, or must be staged differently.
var ErrOutdated = errors.New("the ruleset changed while it was being written")

// A Plan is a list of transactions. What packets see changes in Switch.
type Plan struct {
	Before, Switch, After nfnetlink.Batch
	// Emptied are chains that cannot be deleted because other programs refer to them.
	Emptied []ChainID
}

// A ChainID identifies a chain of a table.
type ChainID struct {
	Family       nfnetlink.Family
	Table, Chain string
}

// A Leftover is something of ours that is not wanted.
type Leftover struct {
	Name  string
	Mode  nft.Mode
	Place string // " in …", unless the name includes it
}

// String returns its name and the mode that left it.
func (l Leftover) String() string { return l.Name + " of mode " + string(l.Mode) + l.Place }

// Found is a ruleset that was read back.
type Found struct {
	nft.Ruleset
	// Ours is set if this version could have written it, and what it decides has not
	// changed since.
	Ours bool
	// Exact is set if the kernel decides exactly as the policy does.
	Exact bool
}
