package running

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
)

// Bounds of an exchange with an agent: the kubelet waits for one second, and a config
// of 4 MiB takes a third more in JSON.
const (
	probeTimeout = time.Second
	askTimeout   = 5 * time.Second
	maxAnswer    = 8 << 20
)

// ErrNoAnswer means that an agent listens on the socket, but does not answer in time.
var ErrNoAnswer = errors.New("no answer")

// Ask asks the agent on a unix socket for its report. Only a process of root, or of the
// caller's own user, can answer. The error is [ErrNoAnswer] if it is stuck or stopped.
func Ask(socket string) (r Report, err error) {
	pid, err := read(socket, "/agent", &r)
	if err != nil {
		return Report{}, err
	}
	if pid != 0 { // as this process sees it
		r.PID = pid
	}
	r.SecondAgent = second(r)
	return r, nil
}

// second returns the process of another agent than the one that answers, 0 for none. It is
// found by its lock: an agent may notice it only later. Without the lock, the agent itself
// may be the one that has it by now.
func second(r Report) int {
	other := Announced
	if !r.HasLock {
		other = Holder
	}
	pid, found := other()
	if !found || !r.HasLock && pid == r.PID {
		return 0
	}
	return pid
}

// Probe asks an agent by one of the paths for probes, on a unix socket, or by tcp at a HOST:PORT. The reason is
// "" if it answers yes.
func Probe(network, address, path string) (reason string, err error) {
	_, status, text, err := get(network, address, path, probeTimeout)
	if err != nil || status == http.StatusOK {
		return "", err
	}
	return cmp.Or(strings.TrimSpace(string(text)), http.StatusText(status)), nil
}

// Read asks the agent on a unix socket by a path, and reads its answer in JSON, such as the evidence about
// the policy in force. If the agent has none, the error says why.
func Read(socket, path string, answer any) error {
	_, err := read(socket, path, answer)
	return err
}

func read(socket, path string, answer any) (pid int, err error) {
	pid, status, text, err := get("unix", socket, path, askTimeout)
	if err != nil {
		return 0, err
	}
	if status != http.StatusOK {
		return 0, fmt.Errorf("the agent at %s answers %s: %s", config.Printable(socket), http.StatusText(status),
			config.Printable(strings.TrimSpace(string(text))))
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return 0, fmt.Errorf("read the agent's answer: %w", err)
	}
	return pid, nil
}

// get returns the process of an agent on a unix socket, and its answer.
func get(network, address, path string, timeout time.Duration) (pid, status int, text []byte, err error) {
	client := http.Client{Timeout: timeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			if network == "tcp" {
				return new(net.Dialer).DialContext(ctx, network, address)
			}
			c, listener, err := dial(ctx, address)
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
	return 0, 0, nil, fmt.Errorf("no agent answers at %s: %w", config.Printable(address), err)
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
