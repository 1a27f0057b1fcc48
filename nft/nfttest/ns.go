package nfttest

import (
	"os/exec"

	"nft-masq-agent/nft/nfttest/netns"
)

// NS is a network namespace.
type NS = netns.NS

// Process is a program that runs inside a namespace.
type Process = netns.Process

// OpenNS is netns.Open: it creates a namespace that has only the loopback device,
// which is down.
func OpenNS(name string) (*NS, error) { return netns.Open(name) }

// Command is like exec.Command, but also searches the sbin directories.
func Command(name string, args ...string) *exec.Cmd { return netns.Command(name, args...) }

// InUserNS is netns.InUserNS: it re-executes the program in a user namespace if
// it needs one to create network namespaces.
func InUserNS() (code int, ran bool) { return netns.InUserNS() }
