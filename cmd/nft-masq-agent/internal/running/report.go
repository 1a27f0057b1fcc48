package running

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"nft-masq-agent/config"
)

// A Report is what an agent answers to GET /agent on its unix socket.
type Report struct {
	PID  int      `json:"pid"`
	Args []string `json:"args"` // after the names of the program and the command
	// ConfigPath is absolute, in the agent's file system.
	ConfigPath string `json:"configPath"`

	Alive string `json:"alive"` // why its loop is stuck, "" if it is not
	Ready string `json:"ready"` // why it is not ready, "" if it is

	// Source is the source of the policy that the agent enforces, as the metric
	// config_source names it; "" if none is known yet.
	Source string `json:"source"`
	// Compiled means that the agent compiled this policy: from Files, byte for byte, or
	// from the built-in defaults if there are none; by Args; and with Addresses, those of
	// the node, if it has snatAddresses. Otherwise it is that of rules that the agent found.
	Compiled  bool            `json:"compiled"`
	Files     []config.Source `json:"files"`
	Addresses []netip.Addr    `json:"addresses"`
	// Policy is what is in the kernel, as far as the agent knows; nil for nothing of ours.
	Policy *Policy `json:"policy,omitempty"`

	// Rejected are the errors and mistakes because of which the config is rejected, or
	// why it cannot be read; empty if it is accepted.
	Rejected config.Problems `json:"rejected"`
	Warnings config.Problems `json:"warnings"`
	// Vanished says that there was a config in this run and there is none any more; "" otherwise.
	Vanished string `json:"vanished"`
	// Problems are those of the last minute.
	Problems config.Problems `json:"problems"`
	// Failure is why the kernel cannot be read, or rejects the rules; "" if neither.
	Failure string `json:"failure"`
	// Delayed says that it is only because other programs write all the time.
	Delayed bool `json:"delayed"`
	// HasLock means that the agent is the first one in its network namespace.
	HasLock bool `json:"hasLock"`
	// SecondAgent is the process of another agent in this network namespace, 0 for none; -1
	// if its PID namespace hides it. A command looks again, because processes have other IDs
	// in its PID namespace.
	SecondAgent int `json:"secondAgent"`
}

// A Policy is the policy that an agent enforces, and what it last changed in the
// kernel and why.
type Policy struct {
	// Hash of the policy.
	Hash string `json:"hash"`
	// Since is when the agent began to enforce it.
	Since time.Time `json:"since"`
	// Changed is when the agent last changed its rules.
	Changed time.Time `json:"changed"`
	// Change is what it changed.
	Change string `json:"change"`
	// Reason for the change.
	Reason string `json:"reason"`
}

func (p Policy) String() string {
	return config.Printable(fmt.Sprintf("has enforced %s since %s; last change %s: %s (%s)",
		p.Hash, p.Since.UTC().Format(time.RFC3339), p.Changed.UTC().Format(time.RFC3339), p.Change, p.Reason))
}

// Process returns the process of an agent in words.
func Process(pid int) string {
	if pid <= 0 {
		return "pid unknown"
	}
	return fmt.Sprintf("pid %d", pid)
}

// String returns the agent and its flags, quoted because they are another process's text.
func (r Report) String() string {
	if len(r.Args) == 0 {
		return fmt.Sprintf("the running agent (pid %d, without flags)", r.PID)
	}
	return fmt.Sprintf("the running agent (pid %d: %s)", r.PID, config.Printable(strings.Join(r.Args, " ")))
}
