package running

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

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
	// Problems are those of the last minute.
	Problems config.Problems `json:"problems"`
	// Refusal is why the kernel cannot be read, or refuses the rules; "" if neither.
	Refusal string `json:"refusal"`
	// Delayed says that it is only because other programs write all the time.
	Delayed bool `json:"delayed"`
	// SecondAgent is the process of another agent in this network namespace, 0 for none; -1
	// if its namespace hides it. The agent knows only of one that was there before it.
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
	// What it changed.
	What string `json:"change"`
	// Why is the reason for the change.
	Why string `json:"reason"`
}

func (p Policy) String() string {
	return config.Printable(fmt.Sprintf("has enforced %s since %s; last change %s: %s (%s)",
		p.Hash, p.Since.UTC().Format(time.RFC3339), p.Changed.UTC().Format(time.RFC3339), p.What, p.Why))
}

// Bounds of an exchange with an agent: the kubelet waits for one second, and a config
// of 4 MiB takes a third more in JSON.
const (
	probeTimeout = time.Second
	askTimeout   = 5 * time.Second
	maxAnswer    = 8 << 20
)

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

// ErrNoAnswer means that an agent listens on the socket, but does not answer in time.
var ErrNoAnswer = errors.New("no answer")

// Ask asks the agent on a unix socket for its report. Only a process of root, or of the
// caller's own user, can answer. The error is [ErrNoAnswer] if it is stuck or stopped.
func Ask(socket string) (r Report, err error) {
	pid, status, text, err := get(socket, "/agent", askTimeout)
	if err != nil {
		return Report{}, err
	}
	if status != http.StatusOK {
		return Report{}, fmt.Errorf("the agent at %s answers %s: it is another version", config.Printable(socket),
			http.StatusText(status))
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return Report{}, fmt.Errorf("read the agent's report: %w", err)
	}
	if pid != 0 { // as this process sees it
		r.PID = pid
	}
	if r.SecondAgent == 0 {
		r.SecondAgent, _ = listener(laterName)
	}
	return r, nil
}

// Probe asks the agent on a unix socket by one of the paths for probes. The reason is
// "" if it answers yes.
func Probe(socket, path string) (reason string, err error) {
	_, status, text, err := get(socket, path, probeTimeout)
	if err != nil || status == http.StatusOK {
		return "", err
	}
	return strings.TrimSpace(string(text)), nil
}

func get(socket, path string, timeout time.Duration) (pid, status int, text []byte, err error) {
	client := http.Client{Timeout: timeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, listener, err := dial(ctx, socket)
			if err == nil {
				pid = int(listener.Pid)
			}
			return c, err
		},
	}}
	response, err := client.Get("http://agent" + path)
	if err == nil {
		defer response.Body.Close()
		text, err = io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	}
	var op *net.OpError
	switch {
	case err == nil:
		return pid, response.StatusCode, text, nil
	case os.IsTimeout(err):
		return 0, 0, nil, fmt.Errorf("%w from the agent within %s", ErrNoAnswer, timeout)
	case errors.As(err, &op):
		err = op.Err
	}
	return 0, 0, nil, fmt.Errorf("no agent answers at %s: %w", config.Printable(socket), err)
}

// dial connects to a unix socket that a process of root or of the caller's user
// listens on: other users can create sockets, too.
func dial(ctx context.Context, address string) (net.Conn, *unix.Ucred, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", address)
	if err != nil {
		return nil, nil, err
	}
	var listener *unix.Ucred
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err == nil {
		controlErr := raw.Control(func(fd uintptr) {
			listener, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		})
		err = errors.Join(err, controlErr)
	}
	if err == nil && listener.Uid != 0 && int(listener.Uid) != os.Geteuid() {
		err = fmt.Errorf("a process of user %d listens there", listener.Uid)
	}
	if err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, listener, nil
}
