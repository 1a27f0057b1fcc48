package netns

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Command is like exec.Command, but also searches the sbin directories if they
// are not in the caller's PATH.
func Command(name string, args ...string) *exec.Cmd {
	if _, err := exec.LookPath(name); err == nil || strings.Contains(name, "/") {
		return exec.Command(name, args...)
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return exec.Command(path, args...)
		}
	}
	return exec.Command(name, args...)
}

// Process is a program that runs inside a namespace.
type Process struct {
	*os.Process
	done chan struct{}
	err  error
}

// Done is closed when the program has exited and its output has been copied.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the program to exit and returns the error of exec.Cmd.Wait.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Start starts cmd inside the namespace, in a new mount namespace without network
// names and DNS. The program is killed when the process that started it exits.
// The caller must not call cmd.Wait or use cmd's pipes: output goes to cmd.Stdout
// and cmd.Stderr.
func (n *NS) Start(cmd *exec.Cmd) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &unix.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	p := &Process{done: make(chan struct{})}
	started := make(chan error)
	onDedicatedThread(func() {
		var err error
		for _, step := range []func() error{n.enter, hideMachine, cmd.Start} {
			if err == nil {
				err = step()
			}
		}
		p.Process = cmd.Process
		started <- err
		if err == nil {
			// The thread must outlive the program, because Pdeathsig refers to
			// the thread.
			p.err = cmd.Wait()
			close(p.done)
		}
	})
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: start: %w", n.name, err)
	}
	return p, nil
}

// Run starts cmd inside the namespace and waits for it to exit.
func (n *NS) Run(cmd *exec.Cmd) error {
	p, err := n.Start(cmd)
	if err != nil {
		return err
	}
	return p.Wait()
}

// Output runs a program inside the namespace with stdin and returns what it
// printed to standard output. The error includes what it printed first to standard
// error, at most 10 lines of 200 bytes: nft repeats the line that it rejects.
func (n *NS) Output(stdin, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := Command(name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := n.Run(cmd); err != nil {
		var said strings.Builder
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
		for _, line := range lines[:min(10, len(lines))] {
			fmt.Fprintf(&said, "\n%.200s", line)
		}
		call := strings.Join(append([]string{name}, args...), " ")
		return stdout.String(), fmt.Errorf("%s: %s: %w%s", n.name, call, err, &said)
	}
	return stdout.String(), nil
}

// hideMachine moves the calling thread to a new mount namespace, in which no
// address has a name: Debian's /etc/networks names 169.254.0.0/16 link-local, and
// a listing without -n queries DNS for every host address. Nor does it see the lock
// of iptables-legacy, which fails while another one runs anywhere on the machine.
func hideMachine() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("new mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	for path, text := range map[string]string{
		"/etc/networks":      "",
		"/etc/resolv.conf":   "",
		"/etc/nsswitch.conf": "hosts: files\nnetworks: files\n",
		"/run/xtables.lock":  "",
	} {
		if err := cover(path, text); err != nil {
			return err
		}
	}
	return nil
}

// cover bind-mounts a file with this text over path, if path exists.
func cover(path, text string) error {
	if _, err := os.Stat(path); err != nil {
		return nil
	}
	file, err := os.CreateTemp("", "netns-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = file.WriteString(text)
	err = errors.Join(err, file.Chmod(0o644), file.Close(), unix.Mount(file.Name(), path, "", unix.MS_BIND, ""))
	if err != nil {
		return fmt.Errorf("cover %s: %w", path, err)
	}
	return nil
}
