package running

import (
	"bufio"
	"cmp"
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
	pid, _ := other()
	if !r.HasLock && pid == r.PID {
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
	pid, status, text, err = exchange(network, address, path, time.Now().Add(timeout))
	var op *net.OpError
	switch {
	case err == nil:
		return pid, status, text, nil
	case os.IsTimeout(err):
		return 0, 0, nil, fmt.Errorf("%w from the agent within %s", ErrNoAnswer, timeout)
	case errors.As(err, &op):
		err = op.Err
	}
	return 0, 0, nil, fmt.Errorf("no agent answers at %s: %w", config.Printable(address), err)
}

// exchange sends a request on a connection of its own, and reads the answer. With [http.Client], which can do much
// more, the program would be 0.3 MB larger.
func exchange(network, address, path string, deadline time.Time) (pid, status int, text []byte, err error) {
	c, pid, err := dial(network, address, deadline)
	if err != nil {
		return 0, 0, nil, err
	}
	defer c.Close()
	request, err := http.NewRequest(http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return 0, 0, nil, err
	}
	request.Close = true
	if err := request.Write(c); err != nil {
		return 0, 0, nil, err
	}
	response, err := http.ReadResponse(bufio.NewReader(c), request)
	if err != nil {
		return 0, 0, nil, err
	}
	defer response.Body.Close()
	text, err = io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	return pid, response.StatusCode, text, err
}

// dial connects, and returns the process that listens on a unix socket. It must be of root or of the caller's user:
// other users can create sockets, too.
func dial(network, address string, deadline time.Time) (c net.Conn, pid int, err error) {
	c, err = (&net.Dialer{Deadline: deadline}).Dial(network, address)
	if err != nil {
		return nil, 0, err
	}
	err = c.SetDeadline(deadline)
	if socket, ok := c.(*net.UnixConn); ok && err == nil {
		pid, err = peer(socket)
	}
	if err != nil {
		_ = c.Close()
		return nil, 0, err
	}
	return c, pid, nil
}

func peer(socket *net.UnixConn) (pid int, err error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return 0, err
	}
	var listener *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) {
		listener, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, controlErr); err != nil {
		return 0, err
	}
	if listener.Uid != 0 && int(listener.Uid) != os.Geteuid() {
		return 0, fmt.Errorf("a process of user %d listens there", listener.Uid)
	}
	return int(listener.Pid), nil
}
