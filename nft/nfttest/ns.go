package nfttest

import (
	"os/exec"

	"nft-masq-agent/nft/nfttest/netns"
)

// NS is a network namespace.
type NS = netns.NS

// Process is a program that runs inside a namespace.
type Process = netns.Process

// OpenNS is netns.Open: only the loopback device exists, down.
func OpenNS(name string) (*NS, error) { return netns.Open(name) }

// Command is exec.Command, which also looks where administrators' programs are.
func Command(name string, args ...string) *exec.Cmd { return netns.Command(name, args...) }

// InUserNS is netns.InUserNS: it starts the program again in a user namespace,
// where it needs one to have namespaces at all.
func InUserNS() (code int, ran bool) { return netns.InUserNS() }
