package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
	"nft-masq-agent/nft/node"
)

// asMain makes the test binary act as the program, so that tests see the same as
// a shell.
const asMain = "NFT_MASQ_AGENT_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		prepare()
		if socket := os.Getenv(asSocket); socket != "" {
			e := theEnvironment()
			e.socket = socket
			os.Exit(dispatch(context.Background(), commands(), os.Args[1:], e))
		}
		main()
	}
	os.Exit(agent.Main(m))
}

// asSocket is the socket on which such a program asks for an agent.
const asSocket = "NFT_MASQ_AGENT_TEST_SOCKET"

// A result is the result of a run of the program.
type result struct {
	stdout, stderr string
	code           int
}

// nodeOfTranscripts has the addresses that transcripts show.
func nodeOfTranscripts(t *testing.T) *nfttest.NS {
	t.Helper()
	return nfttest.NewNode(t, nfttest.Links("eth0")+"link set eth0 addrgenmode none", "addr add 192.0.2.2/24 dev eth0",
		"-6 addr add fd00::2/64 dev eth0 nodad", "-6 addr add fe80::fc:ff:fe00:1/64 dev eth0 nodad",
		"route add default via 192.0.2.1", "-6 route add default via fd00::1")
}

// runProgram runs the program on a node in a directory, without capabilities: it answers by
// the files alone.
func runProgram(t *testing.T, node *nfttest.NS, dir string, args ...string) result {
	t.Helper()
	self, err := os.Executable()
	nfttest.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), asMain+"=1", asSocket+"="+filepath.Join(t.TempDir(), "none"))
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var ended *exec.ExitError
	err = withoutCapabilities(node, cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil && !errors.As(err, &ended) {
		t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// withoutCapabilities starts a program that has no capabilities on a node, on a thread that
// ends with its empty bounding set.
func withoutCapabilities(node *nfttest.NS, start func() error) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(node.Fd(), unix.CLONE_NEWNET)
		if err == nil {
			err = limitCapabilities(nil)
		}
		if err == nil {
			err = start()
		}
		started <- err
	}()
	return <-started
}

// runHere runs the program in this process. It must not begin to wait.
func runHere(t *testing.T, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	code := dispatch(ctx, commands(), args, testEnvironment(t, &stdout, &stderr))
	validate(t, args, stdout.String())
	return result{stdout.String(), stderr.String(), code}
}

// onNode calls a function on a thread of [nodeOfTranscripts].
func onNode(t *testing.T, do func()) {
	t.Helper()
	err := nodeOfTranscripts(t).Do(func() error {
		do()
		return nil
	})
	nfttest.NoError(t, err)
}

// errUnreadable is why commands in a testEnvironment answer from the config only.
var errUnreadable = errors.New("no kernel in this test")

// testEnvironment is that of a node of which no rules can be read, and on which no agent runs.
func testEnvironment(t *testing.T, stdout, stderr io.Writer) environment {
	t.Helper()
	return environment{
		stdout: stdout, stderr: stderr, proc: t.TempDir(), socket: filepath.Join(t.TempDir(), "none"),
		kernel:    kernel.New(nfnetlink.New(func() (*netlink.Conn, error) { return nil, errUnreadable })),
		addresses: node.Addresses,
	}
}

func TestWithoutTheCapabilityEachCommandSaysHowToGiveIt(t *testing.T) {
	nfttest.SkipIfShort(t)
	node := nodeOfTranscripts(t)
	for _, line := range []string{
		"status", "diff", "connections", "connections --stale", "explain 203.0.113.9", "explain 203.0.113.9 --trace",
		"cleanup", "cleanup --dry-run",
		"cleanup --legacy-only",
	} {
		got := runProgram(t, node, t.TempDir(), strings.Fields(line)...)
		says := unwrap(got.stdout + got.stderr)
		if done := got.code == exitDone; done != (line == "explain 203.0.113.9") ||
			!strings.Contains(says, "NET_ADMIN in the network namespace of the node is missing: run as root there") {
			t.Errorf("%s: %+v", line, got)
		}
	}
}
