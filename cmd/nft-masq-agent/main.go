// Command nft-masq-agent controls on a Kubernetes node which pod traffic keeps the
// pod's IP and which is masqueraded to the node's. It takes the config file and
// the flags of ip-masq-agent, and uses nf_tables.
package main

import (
	"context"
	"io"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/node"
)

func main() {
	if os.Getenv("GOGC") == "" {
		// With this, the agent's heap is 1 MB instead of 4 MB at rest, and a
		// config of 1 MiB takes no longer. Other commands run in its container
		// and share its memory limit.
		debug.SetGCPercent(25)
	}
	os.Exit(dispatch(context.Background(), commands(), os.Args[1:], theEnvironment()))
}

// commands returns the commands, in the order of the help.
func commands() []command {
	return slices.Concat([]command{runCommand(), readyCommand()}, lookCommands(), []command{
		cleanupCommand(), versionCommand(), helpCommand(),
	})
}

// An environment is what a command uses besides its arguments.
type environment struct {
	command        string // its name
	stdin          io.Reader
	stdout, stderr io.Writer
	fit            bool   // whether stdout is a terminal
	person         bool   // whether a person has typed the command line, not in a pod
	asks           bool   // whether stdin and stderr are terminals, so that a question can be answered
	proc           string // mount point of procfs
	socket         string // of the running agent

	kernel    *kernel.Kernel               // of this network namespace, on which nothing is open yet
	addresses func() ([]netip.Addr, error) // [node.Addresses]
}

func theEnvironment() environment {
	terminal := isTerminal(os.Stderr)
	fit := isTerminal(os.Stdout)
	return environment{
		stdin:     os.Stdin,
		stdout:    os.Stdout,
		stderr:    os.Stderr,
		fit:       fit,
		asks:      terminal && isTerminal(os.Stdin),
		person:    terminal && fit && os.Getenv("KUBERNETES_SERVICE_HOST") == "",
		proc:      "/proc",
		socket:    cli.DefaultProbeSocket,
		kernel:    kernel.Open(),
		addresses: node.Addresses,
	}
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
