package agent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// An Agent is a running agent.
type Agent struct {
	*nfttest.Process
	*Log
	stderr bytes.Buffer // to be read after it has exited
}

// Start starts the command that runs an agent inside the namespace. Output also
// goes to cmd.Stdout if that is set, before it is in the Log.
func Start(n *nfttest.NS, cmd *exec.Cmd) (*Agent, error) {
	a := &Agent{Log: NewLog()}
	cmd.Stdout, cmd.Stderr = io.MultiWriter(cmp.Or[io.Writer](cmd.Stdout, io.Discard), a.Log), &a.stderr
	var err error
	if a.Process, err = n.Start(cmd); err != nil {
		return nil, err
	}
	a.ended, a.exit = a.Done(), a.failure
	return a, nil
}

// Run is Start for tests. It kills the agent when the test ends, shows the log if
// the test failed, and fails it if a line has no event.
func Run(tb testing.TB, n *nfttest.NS, cmd *exec.Cmd) *Agent {
	tb.Helper()
	a, err := Start(n, cmd)
	nfttest.NoError(tb, err)
	tb.Cleanup(func() {
		_ = a.Kill()
		select {
		case <-a.Done():
		case <-time.After(timeout):
			// A file system that does not respond may only be unmounted after this.
			tb.Errorf("the agent %d cannot be killed, and logged:\n%s", a.Pid, a.Log)
			return
		}
		if a.Count("") > 0 {
			tb.Errorf("%d lines of the log have no event", a.Count(""))
		}
		if tb.Failed() {
			tb.Logf("the agent %d logged:\n%s\n%s", a.Pid, a.Log, &a.stderr)
		}
	})
	return a
}

// failure returns how an agent that has exited failed, and what it wrote to standard
// error.
func (a *Agent) failure() error {
	err := a.Wait()
	if a.stderr.Len() > 0 {
		err = errors.Join(err, errors.New(a.stderr.String()))
	}
	return err
}

// Stop terminates the agent as a rolling update does. It is an error if it fails
// or writes to standard error.
func (a *Agent) Stop() error {
	if err := a.Signal(unix.SIGTERM); err != nil {
		return fmt.Errorf("stop the agent: %w", err)
	}
	return a.Ended()
}

// Ended waits for the agent to exit. It is an error if it fails or has written to
// standard error.
func (a *Agent) Ended() error {
	select {
	case <-a.Done():
	case <-time.After(timeout):
		return errors.New("the agent does not exit")
	}
	if err := a.failure(); err != nil {
		return fmt.Errorf("the agent exited: %w\n%s", err, a.Log)
	}
	return nil
}

// Stderr returns what an agent that has exited wrote to standard error.
func (a *Agent) Stderr() string { return a.stderr.String() }

// Memory returns the peak and the current resident memory of the process, in
// bytes.
func (a *Agent) Memory() (peak, now int64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Pid))
	for name, into := range map[string]*int64{"\nVmHWM:": &peak, "\nVmRSS:": &now} { // see proc_pid_status(5)
		_, value, _ := strings.Cut(string(text), name)
		_, scanErr := fmt.Sscan(value, into)
		err = errors.Join(err, scanErr)
		*into <<= 10
	}
	return peak, now, err
}

// ProcessorTime returns the CPU time of the process, user and system.
func (a *Agent) ProcessorTime() (time.Duration, error) {
	const sched = 2 // CPUCLOCK_SCHED, see clock_getcpuclockid(3)
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^a.Pid<<3|sched), &t); err != nil {
		return 0, fmt.Errorf("processor time: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

// OpenFiles returns the number of open file descriptors of the process.
func (a *Agent) OpenFiles() (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.Pid))
	return len(entries), err
}
