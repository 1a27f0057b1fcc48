package nft

import (
	"context"

	"nft-masq-agent/nft/nfnetlink"
)

// A Depth is how much of the kernel is read. Each includes the one before it.
type Depth int

// The depths.
const (
	// NoDepth is not a depth: whoever asks for a check says how deep it is.
	NoDepth Depth = iota
	// Frame is the wanted mode's table, or chain, without the elements of sets and the rules of chains to which
	// only maps lead. These are taken to be as the last Apply left them.
	Frame
	// Contents is all of it.
	Contents
	// WithLeftovers is also what other modes, or other names of our chain, left behind.
	WithLeftovers
	// TakeOver is also the rules of iptables-based agents, which are to go.
	TakeOver
)

// A KernelState is what the kernel has of one mode, at one generation of the ruleset,
// compared with the ruleset that is wanted: of this mode, of another one, or none.
type KernelState interface {
	// Differences returns why Stage and Switch are needed, or not possible.
	Differences() []Difference
	// Stage writes what no rule refers to yet.
	Stage(ctx context.Context, commit Commit) error
	// Switch adds to the transaction that changes what packets see, and to one after it,
	// when no packet sees the old rules any more. Both are right whatever other programs have
	// committed since the state was read, as long as the conditions of the batch hold.
	Switch(first, second *nfnetlink.Batch)
	// Installed returns our rules that the kernel has, in whatever condition.
	Installed() (Installed, bool)
}

// A Commit sends a transaction.
type Commit func(*nfnetlink.Batch) error

// A Replacer is a [KernelState] of a table that is only ours.
type Replacer interface {
	// Replace deletes the table and creates the wanted one, in one transaction unless the
	// kernel needs two. Then the state must be read again.
	Replace(commit Commit) error
}

// Installed identifies rules of ours.
type Installed struct {
	Layout Layout
	Hash   string // of their policy, "" if another program changed the rule that has it
}
