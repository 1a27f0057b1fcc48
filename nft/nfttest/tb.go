package nfttest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inUserNS marks a test program that Main has started again.
const inUserNS = "NFTTEST_IN_USER_NAMESPACE"

// Main runs the tests of a package and returns the exit code. Without the
// privileges that namespaces need it starts the test program again in a user
// namespace, where it has them. It is the body of TestMain:
//
//	func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }
func Main(m *testing.M) int {
	if privileged() == nil || os.Getenv(inUserNS) != "" {
		return m.Run()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inUserNS+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   unix.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) {
		return cmd.ProcessState.ExitCode()
	}
	// No user namespaces here. Require says so, in each test that needs one.
	return m.Run()
}

// privileged says what is missing to make network namespaces and use them.
func privileged() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	var missing []string
	for bit, name := range map[int]string{
		unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_NET_RAW: "CAP_NET_RAW", unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN",
	} {
		if data[0].Effective&(1<<bit) == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("missing %s, and no user namespace to have it in", strings.Join(missing, ", "))
	}
	return nil
}

// Require skips a test that cannot run here, because it has not the privileges
// or one of the programs is not installed. With REQUIRE_KERNEL=1 in the
// environment the test fails instead, so that nothing goes untested unnoticed.
func Require(tb testing.TB, programs ...string) {
	tb.Helper()
	err := privileged()
	for _, name := range programs {
		if err == nil {
			err = Command(name).Err
		}
	}
	switch {
	case err == nil:
	case os.Getenv("REQUIRE_KERNEL") == "1":
		tb.Fatalf("kernel test cannot run: %v", err)
	default:
		tb.Skipf("kernel test cannot run: %v", err)
	}
}

// NewNS makes a namespace in which only the loopback device exists, up, and
// closes it when the test ends.
func NewNS(tb testing.TB, name string) *NS {
	tb.Helper()
	Require(tb)
	n, err := OpenNS(name)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { report(tb, n.Close()) })
	if err := n.LinkUp("lo"); err != nil {
		tb.Fatal(err)
	}
	return n
}

// NewTopology builds a Topology and closes it when the test ends.
func NewTopology(tb testing.TB) *Topology {
	tb.Helper()
	Require(tb)
	t, err := OpenTopology()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { report(tb, t.Close()) })
	return t
}

func report(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Error(err)
	}
}

// Run runs a program inside the namespace and returns what it printed. The test
// ends where the program fails, and is skipped where it is not installed.
func Run(tb testing.TB, n *NS, stdin, name string, args ...string) string {
	tb.Helper()
	Require(tb, name)
	out, err := n.Output(stdin, name, args...)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

// NFT runs nft inside the namespace: NFT(tb, n, ruleset, "-f", "-").
func NFT(tb testing.TB, n *NS, stdin string, args ...string) string {
	tb.Helper()
	return Run(tb, n, stdin, "nft", args...)
}

// ListRuleset returns what `nft list ruleset` prints, without handles.
func ListRuleset(tb testing.TB, n *NS) string {
	tb.Helper()
	return NFT(tb, n, "", "list", "ruleset")
}

// Save returns what a program like iptables-nft-save prints of one table,
// without the comments, which hold the time of day.
func Save(tb testing.TB, n *NS, program, table string) string {
	tb.Helper()
	var kept strings.Builder
	for line := range strings.Lines(Run(tb, n, "", program, "-t", table)) {
		if !strings.HasPrefix(line, "#") {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

// MustSend is Topology.Send in a test.
func MustSend(tb testing.TB, t *Topology, flow Flow) Sighting {
	tb.Helper()
	s, err := t.Send(flow)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// StartHammer is Topology.StartHammer in a test, and stops the Hammer when the
// test ends, if it still runs.
func StartHammer(tb testing.TB, t *Topology, targets ...Target) *Hammer {
	tb.Helper()
	h, err := t.StartHammer(targets...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_, err := h.Stop()
		report(tb, err)
	})
	return h
}
