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

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/node"

	"golang.org/x/sys/unix"
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
	return []command{
		runCommand(),
		readyCommand(),
		checkCommand(),
		diffCommand(),
		renderCommand(),
		statusCommand(),
		explainCommand(),
		connectionsCommand(),
		monitorCommand(),
		cleanupCommand(),
		completionCommand(),
		versionCommand(),
		helpCommand(),
	}
}

// An environment is what a command uses besides its arguments.
type environment struct {
	command        string // its name
	stdin          io.Reader
	stdout, stderr io.Writer
	terminal       bool   // whether stderr is one
	fit            bool   // whether stdout is one
	color          bool   // whether text may have colors
	stream         bool   // whether each answer as JSON is a line
	person         bool   // whether a person has typed the command line, not in a pod
	proc           string // mount point of procfs
	socket         string // of the running agent

	kernel    func() *neighbors.Node                                     // opens that of this network namespace
	routes    func(src, dst netip.Addr, out string) (node.Routes, error) // [node.Lookup]
	addresses func() ([]netip.Addr, error)                               // [node.Addresses]
	pods      func(ipv6 bool) ([]netip.Addr, error)                      // [node.Pods]
}

func theEnvironment() environment {
	_, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	_, noTerminal := unix.IoctlGetTermios(int(os.Stdout.Fd()), unix.TCGETS)
	return environment{
		stdin:     os.Stdin,
		stdout:    os.Stdout,
		stderr:    os.Stderr,
		terminal:  err == nil,
		fit:       noTerminal == nil,
		color:     noTerminal == nil && os.Getenv("NO_COLOR") == "",
		person:    err == nil && noTerminal == nil && os.Getenv("KUBERNETES_SERVICE_HOST") == "",
		proc:      "/proc",
		socket:    options.DefaultProbeSocket,
		kernel:    neighbors.Open,
		routes:    node.Lookup,
		addresses: node.Addresses,
		pods:      node.Pods,
	}
}

// onThisNode completes a ruleset by the addresses of this node, if it has snatAddresses.
func (e environment) onThisNode(r *nft.Ruleset) (*nft.Ruleset, error) {
	if !r.Policy.HasSNAT() {
		return r, nil
	}
	addresses, err := e.addresses()
	if err != nil {
		return r, err
	}
	here := r.On(addresses)
	return &here, nil
}
