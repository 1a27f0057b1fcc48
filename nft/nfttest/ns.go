package nfttest

import (
	"os/exec"

	"nft-masq-agent/nft/nfttest/netns"
)

// NS is a network namespace.
type NS = netns.NS

// Process is a program that runs inside a namespace.
type Process = netns.Process

// Command is like exec.Command, but also searches the sbin directories.
func Command(name string, args ...string) *exec.Cmd { return netns.Command(name, args...) }
