package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// An agent is a running process of the binary.
type agent struct {
	*nfttest.Process
	log *agentLog
}

// An agentLog takes what the process logs.
type agentLog struct {
	mu      sync.Mutex
	text    bytes.Buffer
	once    sync.Once
	applied chan struct{} // closed when the rules are in the kernel for the first time
}

func (l *agentLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Write(p)
	if bytes.Contains(p, []byte(`"config_applied"`)) {
		l.once.Do(func() { close(l.applied) })
	}
	return len(p), nil
}

func (l *agentLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// startAgent starts the agent and waits until its rules are in the kernel.
func startAgent(n *node, binary string, v *volume) (*agent, error) {
	a := &agent{log: &agentLog{applied: make(chan struct{})}}
	cmd := nfttest.Command(binary, "run", "--config", v.path())
	cmd.Stdout, cmd.Stderr = a.log, a.log
	var err error
	if a.Process, err = n.ns.Start(cmd); err != nil {
		return nil, err
	}
	return a, a.log.wait(a.Process.Done())
}

func (l *agentLog) wait(ended <-chan struct{}) error {
	const patience = time.Minute
	select {
	case <-l.applied:
		return nil
	case <-ended:
		return fmt.Errorf("the agent ended:\n%s", l)
	case <-time.After(patience):
		return fmt.Errorf("the agent applied nothing within %s:\n%s", patience, l)
	}
}

// waitFor waits until the log has the words so many times.
func (l *agentLog) waitFor(words string, times int) error {
	const patience = 10 * time.Second
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if strings.Count(l.String(), words) >= times {
			return nil
		}
	}
	return fmt.Errorf("the agent did not say %q %d times within %s:\n%s", words, times, patience, l)
}

// stop ends the agent.
func (a *agent) stop() error {
	if err := a.Signal(unix.SIGTERM); err != nil {
		return err
	}
	return a.Wait()
}

// timeToApplied is the whole process, from its start to its word that the rules
// are in the kernel.
func timeToApplied(n *node, binary, config string) (time.Duration, error) {
	log := &agentLog{applied: make(chan struct{})}
	cmd := nfttest.Command(binary, "run", "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	start := time.Now()
	if err := n.ns.Do(cmd.Start); err != nil {
		return 0, err
	}
	err := log.wait(nil)
	took := time.Since(start)
	err = errors.Join(err, cmd.Process.Kill())
	_ = cmd.Wait() // says that it was killed
	return took, err
}

// memory reads VmHWM and VmRSS of proc_pid_status(5), in MB.
func (a *agent) memory() (peak, now float64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Pid))
	if err != nil {
		return 0, 0, err
	}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		kb, _ := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(value, "kB")), 64)
		switch key {
		case "VmHWM":
			peak = kb * 1024 / 1e6
		case "VmRSS":
			now = kb * 1024 / 1e6
		}
	}
	return peak, now, lines.Err()
}

// processorTime is what the process has used, user and system.
func (a *agent) processorTime() (time.Duration, error) {
	const sched = 2 // CPUCLOCK_SCHED, see clock_getcpuclockid(3)
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^a.Pid<<3|sched), &t); err != nil {
		return 0, fmt.Errorf("processor time: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

// A volume is a ConfigMap's as the kubelet mounts it: the file is a link by way
// of ..data, which is turned to another directory when the content changes.
type volume struct {
	dir   string
	count int
}

const configName = "ip-masq-agent"

// quietDir makes a directory, as a mounted volume is, not beside where programs
// make files all the time: inotify tells the agent of every name in each directory
// on the way, which would not be rest, and to watch a directory the kernel goes
// through all names that it remembers of it, those that are gone too, which took
// 14 ms for a /tmp with 380,000.
func quietDir() (string, error) {
	quiet := "/dev/shm"
	if _, err := os.Stat(quiet); err != nil {
		quiet = ""
	}
	return os.MkdirTemp(quiet, "bench-")
}

func newVolume(content string) (*volume, error) {
	dir, err := quietDir()
	if err != nil {
		return nil, err
	}
	v := &volume{dir: dir}
	if err := os.Symlink(filepath.Join("..data", configName), v.path()); err != nil {
		return nil, err
	}
	swap, err := v.prepare(content)
	if err != nil {
		return nil, err
	}
	return v, swap()
}

func (v *volume) path() string { return filepath.Join(v.dir, configName) }

// prepare writes the next content. What it gives makes it visible.
func (v *volume) prepare(content string) (swap func() error, err error) {
	v.count++
	next := fmt.Sprintf("..%d", v.count)
	if err := os.Mkdir(filepath.Join(v.dir, next), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(v.dir, next, configName), []byte(content), 0o644); err != nil {
		return nil, err
	}
	link := filepath.Join(v.dir, "..data_tmp")
	if err := os.Symlink(next, link); err != nil {
		return nil, err
	}
	return func() error { return os.Rename(link, filepath.Join(v.dir, "..data")) }, nil
}

func (v *volume) close() error { return os.RemoveAll(v.dir) }
