package nfttest

import (
	"context"
	"errors"
	"flag"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest/netns"
)

// Main runs the tests of a package and returns the exit code. It is the body of
// TestMain; without privileges it uses [netns.InUserNS].
//
//	func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }
func Main(m *testing.M) int {
	if code, ran := netns.InUserNS(); ran {
		return code
	}
	debug.SetGCPercent(400) // a machine that runs tests has more memory than time
	// If there are no user namespaces either, Require reports it.
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		// They wait, for the kernel and for other processes, more than they compute.
		_ = flag.Set("test.parallel", strconv.Itoa(4*runtime.GOMAXPROCS(0)))
	}
	return m.Run()
}

// Long reports whether tests may take as long as it takes to prove their point: in
// the environment is LONG=1.
func Long() bool { return os.Getenv("LONG") == "1" }

// Patient returns how long to wait for something that should happen within d: eight times d, because other programs may
// be busy, and as many times that as SLOW says in the environment, for a machine that is emulated. Only a test that
// fails waits that long.
func Patient(d time.Duration) time.Duration {
	const busy = 8
	slow, _ := strconv.Atoi(os.Getenv("SLOW"))
	return time.Duration(max(slow, 1)*busy) * d
}

// While repeats a task while it fails with an error that passes, until the context ends. A program that is being started
// keeps what this process has had open, such as the lock of a trace, for a moment.
func While(ctx context.Context, passing error, do func() error) error {
	err := do()
	for errors.Is(err, passing) && ctx.Err() == nil {
		runtime.Gosched()
		err = do()
	}
	return err
}

// Until waits for something that no event tells.
func Until(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	end := time.Now().Add(Patient(15 * time.Second))
	for pause := time.Millisecond; !holds(); pause = min(2*pause, 50*time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("%s: never comes", what)
		}
		time.Sleep(pause)
	}
}

// Rounds returns how often a test repeats something: with -short, usually, and if
// [Long].
func Rounds(short, usual, most int) int {
	if Short() {
		return short
	}
	return FullRounds(usual, most)
}

// FullRounds is [Rounds] for tests that [SkipIfShort] skips.
func FullRounds(usual, most int) int {
	if Long() {
		return most
	}
	return usual
}

// SkipIfShort skips a test that takes long: with -short it is not run, in `make test`
// it is.
func SkipIfShort(tb testing.TB) {
	tb.Helper()
	if Short() {
		tb.Skip("-short")
	}
}

// Short reports whether what takes long is left out.
func Short() bool { return testing.Short() && !Long() }

// Require skips a test that cannot run here, because it lacks privileges or one
// of the programs is not installed. With REQUIRE_KERNEL=1 in the environment the
// test fails instead, so that nothing is skipped unnoticed.
func Require(tb testing.TB, programs ...string) {
	tb.Helper()
	err := netns.Privileged()
	for _, name := range programs {
		if err == nil {
			err = Command(name).Err
		}
	}
	canRun(tb, err)
}

// PassBridgedPackets makes what a bridge passes on meet the chains of IP, as kubeadm asks for. Like [Require], it skips
// the test on a kernel without br_netfilter.
func PassBridgedPackets(tb testing.TB, n *NS) {
	tb.Helper()
	canRun(tb, n.Sysctl("net.bridge.bridge-nf-call-iptables", "1"))
	canRun(tb, n.Sysctl("net.bridge.bridge-nf-call-ip6tables", "1"))
}

func canRun(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case err == nil:
	case os.Getenv("REQUIRE_KERNEL") == "1":
		tb.Fatalf("kernel test cannot run: %v", err)
	default:
		tb.Skipf("kernel test cannot run: %v", err)
	}
}

// NoError ends the test if there is an error.
func NoError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// Same fails the test if two values differ. What names them, and which is which: "rules (-want +got)".
func Same(tb testing.TB, what string, first, second any, options ...cmp.Option) {
	tb.Helper()
	if diff := cmp.Diff(first, second, options...); diff != "" {
		tb.Errorf("%s:\n%s", what, diff)
	}
}

// NewNS creates a namespace that has only the loopback device, which is up, and
// closes it when the test ends.
func NewNS(tb testing.TB, name string) *NS {
	tb.Helper()
	Require(tb)
	n, err := netns.Open(name)
	NoError(tb, err)
	tb.Cleanup(func() {
		report(tb, n.Close())
		alone(tb)
	})
	NoError(tb, n.LinkUp("lo"))
	return n
}

// NewTopology builds a Topology and closes it when the test ends.
func NewTopology(tb testing.TB) *Topology {
	tb.Helper()
	Require(tb)
	t, err := OpenTopology()
	NoError(tb, err)
	tb.Cleanup(func() {
		report(tb, t.Close())
		alone(tb)
	})
	return t
}

// alone says, of a test that failed, how to run it alone.
func alone(tb testing.TB) {
	tb.Helper()
	if tb.Failed() {
		pattern := strings.ReplaceAll(regexp.QuoteMeta(tb.Name()), "/", "$/^")
		tb.Logf("alone: REQUIRE_KERNEL=1 go test -count=1 -run '^%s$' .", pattern)
	}
}

func report(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Error(err)
	}
}

// Run runs a program inside the namespace and returns its output. The test fails
// if the program fails, and is skipped if it is not installed.
func Run(tb testing.TB, n *NS, stdin, name string, args ...string) string {
	tb.Helper()
	Require(tb, name)
	out, err := n.Output(stdin, name, args...)
	NoError(tb, err)
	return out
}

// NFT runs nft inside the namespace: NFT(tb, n, ruleset, "-f", "-").
func NFT(tb testing.TB, n *NS, stdin string, args ...string) string {
	tb.Helper()
	return Run(tb, n, stdin, "nft", args...)
}

// ListRuleset returns the output of `nft list ruleset`, without handles.
func ListRuleset(tb testing.TB, n *NS) string {
	tb.Helper()
	return NFT(tb, n, "", "list", "ruleset")
}

// Save returns the output of a program like iptables-nft-save for one table,
// without the comments, which contain the time.
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

// MustSend is Topology.Send for tests.
func MustSend(tb testing.TB, t *Topology, flow Flow) Sighting {
	tb.Helper()
	s, err := t.Send(flow)
	NoError(tb, err)
	return s
}

// StartHammer is Topology.StartHammer for tests. It stops the Hammer when the
// test ends.
func StartHammer(tb testing.TB, t *Topology, targets ...Target) *Hammer {
	tb.Helper()
	h, err := t.StartHammer(targets...)
	NoError(tb, err)
	tb.Cleanup(func() {
		_, err := h.Stop()
		report(tb, err)
	})
	return h
}
