package nft

import (
	"errors"

	"nft-masq-agent/config"
)

// Mode is the name of a layout on the command line.
type Mode string

// The modes.
const (
	ModeNFTables Mode = "nftables"     // a separate table
	ModeIPTables Mode = "iptables-nft" // the chain that iptables lists
)

// A Layout is a mode with what it needs to write a policy into the kernel. Equal layouts write a policy alike.
type Layout interface {
	Mode() Mode
	// Chain returns the name that the operator chose for its chain, "" if it cannot be chosen.
	Chain() string
	// Check returns why the layout cannot express a config, nil if it can.
	Check(c config.Config) config.Problems
	// Compile returns the tables for a policy with this hash.
	Compile(p Policy, hash string) []Table
	// Text returns the tables as a file for the program of the mode.
	Text(tables []Table) string
}

// ErrPostroutingHook reports that iptables cannot use a chain POSTROUTING, and
// neither can mode iptables-nft: its hook is not that of iptables.
var ErrPostroutingHook = errors.New("iptables cannot use it")
