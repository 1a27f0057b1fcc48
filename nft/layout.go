package nft

import (
	"errors"

	"nft-masq-agent/config"
)

// Mode names a layout, as the command line does.
type Mode string

// The modes.
const (
	ModeNFTables Mode = "nftables"     // a table of our own
	ModeIPTables Mode = "iptables-nft" // the view that iptables shows
)

// A Layout is how a policy is written into the kernel. Two layouts are equal if
// they write a policy alike.
type Layout interface {
	// Mode is its name.
	Mode() Mode
	// Chain is the name that the operator chose for its chain, "" if there is no choice.
	Chain() string
	// Supports reports whether its rules can express a condition.
	Supports(row config.Condition) bool
	// Translates reports whether its rules can express [config.Translations].
	Translates() bool
	// Ordered reports whether its rules show the order in which a list was written.
	Ordered() bool
	// RandomFully reports whether source ports are random unless the flags say otherwise.
	RandomFully() bool
	// CountersLast reports whether its counters survive an update of the rules.
	CountersLast() bool
	// Check says why it cannot express a config, and returns warnings about one that
	// it can.
	Check(c config.Config) ([]config.Problem, error)
	// Compile lays out a policy with this hash.
	Compile(p Policy, hash string) []Table
	// CheckTables says why what Compile has returned cannot be.
	CheckTables(tables []Table) error
	// Text prints the tables as the file that its program loads.
	Text(tables []Table) string
}

// ErrForeignChain says that the chain of mode iptables-nft is somebody else's.
var ErrForeignChain = errors.New("the chain holds rules that no masquerade agent wrote")

// ErrForeignPostrouting says that iptables could not use a chain POSTROUTING, and
// neither can mode iptables-nft: its hook is not the one that iptables gives it.
var ErrForeignPostrouting = errors.New("iptables cannot use it")
