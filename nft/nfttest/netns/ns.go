package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NS is a network namespace. It exists until Close, and after that while a
// process runs inside or one of its sockets is open. Its methods are safe for
// concurrent use.
type NS struct {
	name string
	file *os.File // keeps the namespace alive

	mu     sync.Mutex // guards what is opened on first use
	handle *netlink.Handle
	tap    *Tap

	borrowed sync.Mutex // held while tap is in use
}

// Open creates a namespace that has only the loopback device, which is down. The
// name appears in error messages only.
func Open(name string) (*NS, error) {
	n := &NS{name: name}
	made := make(chan error)
	onDedicatedThread(func() {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			n.file, err = openThreadNS()
		}
		made <- err
	})
	if err := <-made; err != nil {
		return nil, fmt.Errorf("%s: new network namespace: %w", name, err)
	}
	return n, nil
}

// OpenPath opens the namespace that a file refers to: /proc/PID/ns/net, or one
// that a container runtime keeps in /run/netns.
func OpenPath(name, path string) (*NS, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &NS{name: name, file: file}, nil
}

// onDedicatedThread starts fn in a goroutine whose thread, which is not the main
// thread, runs nothing else and exits with it. fn may change the thread
// irreversibly; if it has reverted that, it may unlock it.
func onDedicatedThread(fn func()) {
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread exits
		if unix.Gettid() != unix.Getpid() {
			fn()
			return
		}
		// The main thread cannot exit and would stay in fn's namespaces. Hold it
		// until fn runs on another one.
		elsewhere := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(elsewhere)
			fn()
		}()
		<-elsewhere
		runtime.UnlockOSThread()
	}()
}

func openThreadNS() (*os.File, error) {
	return os.Open("/proc/thread-self/ns/net")
}

// String returns the name.
func (n *NS) String() string { return n.name }

// Fd returns the namespace's file descriptor, for libraries that need one. It is
// valid until Close; the caller must keep n reachable while it is in use
// (runtime.KeepAlive), because a descriptor that was closed and reused may refer
// to the namespace of the machine.
func (n *NS) Fd() int { return int(n.file.Fd()) }

// Close closes the namespace.
func (n *NS) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	if n.tap != nil {
		errs = append(errs, n.tap.Close())
		n.tap = nil
	}
	if n.handle != nil {
		n.handle.Close()
		n.handle = nil
	}
	return errors.Join(append(errs, n.file.Close())...)
}

// Do runs fn inside the namespace, in a new goroutine that is locked to its
// thread. Sockets opened by fn stay in the namespace. Goroutines that fn starts
// are not inside. fn may end the test, for example with t.Fatal.
func (n *NS) Do(fn func() error) (err error) {
	done, exited := make(chan struct{}), false
	// In /proc/PID/ns is the main thread's namespace: there the process stays at home.
	onDedicatedThread(func() {
		defer close(done) // after the thread has left the namespace
		home, failed := openThreadNS()
		if failed != nil {
			err = fmt.Errorf("%s: %w", n.name, failed)
			return
		}
		defer home.Close()
		if err = n.enter(); err != nil {
			return
		}
		defer func() {
			// A thread that cannot switch back stays locked and exits here.
			if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		exited = true
		err = fn()
		exited = false
	})
	<-done
	if exited {
		runtime.Goexit()
	}
	return err
}

// In is [NS.Do] of a function with a result.
func In[T any](n *NS, fn func() (T, error)) (out T, err error) {
	err = n.Do(func() (err error) {
		out, err = fn()
		return err
	})
	return out, err
}

// enter moves the calling thread into the namespace.
func (n *NS) enter() error {
	err := unix.Setns(n.Fd(), unix.CLONE_NEWNET)
	runtime.KeepAlive(n)
	if err != nil {
		return fmt.Errorf("%s: enter namespace: %w", n.name, err)
	}
	return nil
}

// DialContext connects to an address from inside the namespace. It fits
// http.Transport; the address must be literal.
func (n *NS) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return In(n, func() (net.Conn, error) { return new(net.Dialer).DialContext(ctx, network, address) })
}

// Sysctl sets a kernel parameter of the namespace: Sysctl("net.ipv4.ip_forward", "1").
func (n *NS) Sysctl(name, value string) error {
	path := filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/"))
	return n.Do(func() error {
		// The kernel picks the namespace of the thread that opens the file.
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("%s: sysctl: %w", n.name, err)
		}
		return nil
	})
}
