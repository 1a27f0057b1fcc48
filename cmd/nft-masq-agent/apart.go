package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
)

// apartKey is set in the environment of a process started by [apart].
const apartKey = "NFT_MASQ_AGENT_APART"

// apartFD is the descriptor to which that process writes its exit code.
const apartFD = 3

// mayHang reports whether the config may be in a file system served by a program
// (FUSE). If that program accepts a request and never replies, the waiting thread
// cannot be killed, and its process cannot exit. The mounts of an agent in
// another mount namespace count, too, because commands read its config.
func mayHang(proc string) bool {
	if os.Getenv(apartKey) != "" {
		return false
	}
	if hasFUSE(filepath.Join(proc, "self")) {
		return true
	}
	for _, a := range running.Agents(proc, program) {
		if hasFUSE(filepath.Join(proc, strconv.Itoa(a.PID))) {
			return true
		}
	}
	return false
}

// hasFUSE reports whether the process of a procfs directory has a FUSE mount.
func hasFUSE(dir string) bool {
	mounts, err := os.ReadFile(filepath.Join(dir, "mountinfo"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(mounts)) {
		_, after, _ := strings.Cut(line, " - ")
		kind, _, _ := strings.Cut(after, " ")
		if kind == "fuse" || kind == "fuseblk" || strings.HasPrefix(kind, "fuse.") {
			return true
		}
	}
	return false
}

// apart re-executes the program in a child process, which can be abandoned, and
// returns its exit code. A daemon gets the signals that it handles; other
// commands are terminated by them together with their child.
func apart(daemon bool) (int, error) {
	runtime.LockOSThread() // Pdeathsig refers to the thread
	defer runtime.UnlockOSThread()
	code, childEnd, err := os.Pipe()
	if err != nil {
		return exitFailed, err
	}
	defer code.Close()
	signals := make(chan os.Signal, 1)
	if daemon {
		signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	}
	child, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{
		Env:   append(os.Environ(), apartKey+"=1"),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, childEnd},
		// The terminal sends its signals to only one of the two.
		Sys: &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: daemon},
	})
	_ = childEnd.Close()
	if err != nil {
		return exitFailed, err
	}
	go func() {
		for s := range signals {
			_ = child.Signal(s)
			if s != unix.SIGHUP {
				signal.Reset(unix.SIGTERM, unix.SIGINT) // a second one kills
			}
		}
	}()
	text, err := io.ReadAll(io.LimitReader(code, 1))
	if err == nil && len(text) == 1 {
		awaitMainThread(child.Pid)
		return int(text[0]), nil
	}
	state, err := child.Wait()
	if err != nil {
		return exitFailed, err
	}
	if s, ok := state.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		return exitFailed, fmt.Errorf("the process that reads the config was killed: %s", s.Signal())
	}
	return state.ExitCode(), nil
}

// awaitMainThread waits until the main thread of an exiting process has exited, and
// with it the command line, by which the process counts as a running agent; at most
// about a second.
func awaitMainThread(pid int) {
	for range 1000 {
		line, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		if err != nil || len(line) == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// exit exits the process. One started by [apart] may have threads that cannot
// exit, which would keep its output open.
func exit(code int) {
	if os.Getenv(apartKey) != "" {
		for fd := range 3 {
			_ = unix.Close(fd)
		}
		_, _ = unix.Write(apartFD, []byte{byte(code)})
	}
	os.Exit(code)
}
