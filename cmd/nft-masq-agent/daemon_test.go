package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// timeout bounds every wait. Only a failing test takes that long.
var timeout = nfttest.Patient(15 * time.Second)

// modes are the modes for which all claims about the kernel are tested.
var modes = []nft.Mode{nft.ModeNFTables, nft.ModeIPTables}

// Environment variables by which a test sets up the program's environment.
const (
	// withCaps restricts it to these capabilities, as a JSON list of numbers.
	withCaps = "NFT_MASQ_AGENT_TEST_CAPS"
	// withMount bind-mounts the file before the colon over the one after it.
	withMount = "NFT_MASQ_AGENT_TEST_MOUNT"
	// withoutBarrier lets membarrier(2) fail with this number.
	withoutBarrier = "NFT_MASQ_AGENT_TEST_NO_MEMBARRIER"
)

// prepare sets up the environment that a test wants for the program. It is in a
// separate mount namespace.
func prepare() {
	if from, to, ok := strings.Cut(os.Getenv(withMount), ":"); ok {
		must(unix.Mount(from, to, "", unix.MS_BIND, ""))
	}
	if errno, ok := os.LookupEnv(withoutBarrier); ok {
		must(failCall(unix.SYS_MEMBARRIER, errno))
	}
	list, ok := os.LookupEnv(withCaps)
	if !ok {
		return
	}
	var keep []uintptr
	must(json.Unmarshal([]byte(list), &keep))
	runtime.LockOSThread() // capabilities are per thread
	must(limitCapabilities(keep))
	must(os.Unsetenv(withCaps))
	must(os.Unsetenv(withMount))
	must(unix.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// limitCapabilities lets what the thread executes have these capabilities alone.
func limitCapabilities(keep []uintptr) error {
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if slices.Contains(keep, c) {
			continue
		}
		// EINVAL: a kernel that does not know the last ones.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// failCall lets a system call of all threads fail with the number of an error.
func failCall(call uint32, errno string) error {
	number, err := strconv.ParseUint(errno, 10, 16)
	if err != nil {
		return err
	}
	filter := []unix.SockFilter{ // see seccomp(2); the number of the call is the first word
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: call},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(number)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, failure := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program)))
	if failure != 0 {
		return failure
	}
	return nil
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// A testNode is a network namespace with the config of its agent.
type testNode struct {
	*nfttest.NS
	t    testing.TB
	path string // of the config; at first only its directory exists
	// socket is that of the agent, which commands ask. Its path has to be short.
	socket string
}

func newNode(t testing.TB) *testNode {
	t.Helper()
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	return nodeIn(t, nfttest.NewNS(t, "node"))
}

func nodeIn(t testing.TB, ns *nfttest.NS) *testNode {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "config")
	nfttest.NoError(t, os.Mkdir(dir, 0o755))
	return &testNode{ns, t, filepath.Join(dir, "ip-masq-agent"), newSocket(t)}
}

// newSocket returns a path for a unix socket, which has at most 107 bytes.
func newSocket(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") //nolint:usetesting // the name of a test can be too long
	nfttest.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "socket")
}

func (n *testNode) check(err error) {
	n.t.Helper()
	nfttest.NoError(n.t, err)
}

// write writes the config in place.
func (n *testNode) write(text string) {
	n.t.Helper()
	n.check(os.WriteFile(n.path, []byte(text), 0o644))
}

// swap replaces the config by a rename.
func (n *testNode) swap(text string) {
	n.t.Helper()
	temporary := n.path + ".new"
	n.check(os.WriteFile(temporary, []byte(text), 0o644))
	n.check(os.Rename(temporary, n.path))
}

// connect returns a connection to nf_tables in the namespace. The caller closes
// it.
func (n *testNode) connect() *nfnetlink.Conn {
	return nfnetlink.New(func() (nl *netlink.Conn, err error) {
		err = n.Do(func() error {
			if nl, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
				return err
			}
			return nl.SetWriteBuffer(8 << 20)
		})
		return nl, err
	})
}

// kernel returns the kernel as a new process sees it, without caches. The caller
// closes it.
func (n *testNode) kernel() *kernel.Kernel { return kernel.New(n.connect()) }

func (n *testNode) generation() uint32 {
	n.t.Helper()
	c := n.connect()
	defer c.Close()
	g, err := c.Generation()
	n.check(err)
	return g
}

// differences returns how the kernel differs from the wanted ruleset of any mode.
// An error counts as a difference, because another program may be writing.
func (n *testNode) differences(want nft.Ruleset) []string {
	k := n.kernel()
	defer k.Close()
	s, err := k.Read(context.Background(), want, nft.WithLeftovers)
	if err != nil {
		return []string{err.Error()}
	}
	var diffs []string
	for _, d := range s.Differences() {
		diffs = append(diffs, d.String())
	}
	return diffs
}

// holds fails the test unless the kernel has exactly the wanted rules.
func (n *testNode) holds(want nft.Ruleset) {
	n.t.Helper()
	for _, d := range n.differences(want) {
		n.t.Errorf("the kernel differs: %s", d)
	}
}

// comes waits for the wanted rules.
func (n *testNode) comes(what string, want nft.Ruleset) {
	n.t.Helper()
	nfttest.Until(n.t, what, func() bool { return len(n.differences(want)) == 0 })
}

// optionsOf parses flags of run.
func optionsOf(t testing.TB, args ...string) cli.Options {
	t.Helper()
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	o := cli.AddRunFlags(fs)
	nfttest.NoError(t, fs.Parse(args))
	return *o
}

// wants compiles a text like the program with these flags; "" means the defaults.
func wants(t testing.TB, text string, args ...string) nft.Ruleset {
	t.Helper()
	o := optionsOf(t, args...)
	b := nft.Build(o.Defaults, o.NFT(), config.Source{Name: "config", Data: []byte(text)})
	nfttest.NoError(t, b.Problems.Err())
	return *b.Ruleset
}

// command returns the command that runs the program.
func (n *testNode) command(env []string, args ...string) *exec.Cmd {
	n.t.Helper()
	self, err := os.Executable()
	n.check(err)
	cmd := nfttest.Command(self, args...)
	cmd.Env = append(append(os.Environ(), asMain+"=1", asSocket+"="+n.socket), env...)
	return cmd
}

// runCommand runs the program on the node to its end.
func (n *testNode) runCommand(cmd *exec.Cmd) result {
	n.t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr
	var ended *exec.ExitError
	if err := n.Run(cmd); err != nil && !errors.As(err, &ended) {
		n.t.Fatal(err)
	}
	validate(n.t, cmd.Args[1:], stdout.String())
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// A daemon is a running agent on a node.
type daemon struct {
	*agent.Agent
	*testNode
	args      []string
	listening bool // for HTTP, and the line is taken

	configured bool // it has had a config for certain
}

// start starts an agent on the node's config.
func (n *testNode) start(args ...string) *daemon {
	n.t.Helper()
	return n.startIn(nil, args...)
}

func (n *testNode) startIn(env []string, args ...string) *daemon {
	n.t.Helper()
	cmd := n.command(env,
		append([]string{"run", "--log-format", "json", "--config", n.path, "--probe-socket", n.socket}, args...)...)
	if program := agent.Prebuilt(); env == nil && program != "" { // which starts sooner
		cmd.Path = program
	}
	d := n.startCommand(cmd)
	for { // it may report what it finds before
		if line := d.await("listening"); !strings.Contains(line.Text("address"), ":") {
			break
		}
		d.listening = true
	}
	d.args = slices.DeleteFunc(args, func(arg string) bool { return arg == "--probe-socket" })
	return d
}

func (n *testNode) startCommand(cmd *exec.Cmd) *daemon {
	n.t.Helper()
	return &daemon{Agent: agent.Run(n.t, n.NS, cmd), testNode: n, args: cmd.Args[1:]}
}

// signal sends a signal. One that stops the agent has stopped all of its threads when this returns.
func (d *daemon) signal(s unix.Signal) {
	d.t.Helper()
	d.check(d.Signal(s))
	if s == unix.SIGSTOP {
		d.check(unix.Waitid(unix.P_PID, d.Pid, nil, unix.WSTOPPED|unix.WNOWAIT, nil))
	}
}

// stop stops the agent like a rolling update. It says so in one line.
func (d *daemon) stop() {
	d.t.Helper()
	d.check(d.Stop())
	var ends []agent.Line
	for _, line := range d.Untaken() {
		if line.Event() == "exiting" {
			ends = append(ends, line)
		}
	}
	if len(ends) != 1 || ends[0].Text("msg") != "exiting; the rules stay" {
		d.t.Errorf("at its end the agent logs %v", ends)
	}
}

// await takes the first log line with one of the events that has not been taken.
func (d *daemon) await(events ...string) agent.Line {
	d.t.Helper()
	line, err := d.Await(d.t.Context(), events...)
	d.check(err)
	return line
}

// silent fails the test if the log has other lines.
func (d *daemon) silent() {
	d.t.Helper()
	for _, line := range d.Untaken() {
		// Its servers listen on goroutines of their own, at any time after the start.
		expected := []string{"exiting", "listening"}
		if os.Getenv("SLOW") != "" { // repairs cost more on such a machine
			expected = append(expected, "repairs_slowed")
		}
		if !hidden(line) && !slices.Contains(expected, line.Event()) {
			d.t.Errorf("the agent logs, too: %v", line)
		}
	}
}

// hidden reports whether a line is about a process that cannot be inspected, or
// that is gone. An agent that may not see the namespaces of other agents reports
// those outside the test, too.
func hidden(l agent.Line) bool {
	if l.Event() != "second_agent" {
		return false
	}
	_, err := os.Readlink(fmt.Sprintf("/proc/%v/ns/net", l["pid"]))
	return err != nil
}

// forgive takes lines that a test cannot rule out.
func (d *daemon) forgive(event string) {
	for d.Take(event) != nil {
	}
}

// until waits for something that the log does not show.
func (d *daemon) until(what string, holds func() bool) {
	d.t.Helper()
	nfttest.Until(d.t, what, func() bool {
		select {
		case <-d.Done():
			d.t.Fatalf("the agent ended before %s", what)
		default:
		}
		return holds()
	})
}

// applied waits until the agent has written the wanted rules, and checks that the
// kernel has them.
func (d *daemon) applied(reason string, want nft.Ruleset) agent.Line {
	d.t.Helper()
	line := d.await("config_applied")
	if line["reason"] != reason || line["hash"] != want.Hash() {
		d.t.Errorf("applied %v, want reason %s and config %s", line, reason, want.Hash())
	}
	d.holds(want)
	return line
}

// began waits until the agent has started and written the wanted rules.
func (d *daemon) began(want nft.Ruleset) {
	d.t.Helper()
	d.await("starting")
	d.answers()
	d.applied("start", want)
}

// answers waits until the agent serves HTTP and probes, if configured.
func (d *daemon) answers() {
	d.t.Helper()
	for _, flag := range []string{"--http-address", "--probe-socket"} {
		if slices.Contains(d.args, flag) && (flag != "--http-address" || !d.listening) {
			d.await("listening")
		}
	}
}

// httpAddress is the HTTP address of agents in tests, in their own namespaces.
const httpAddress = "127.0.0.1:9717"

// get sends an HTTP request to the node's agent.
func (n *testNode) get(path string) (code int, body string) {
	n.t.Helper()
	client := http.Client{
		Transport: &http.Transport{DialContext: n.DialContext, DisableKeepAlives: true},
		Timeout:   timeout,
	}
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+httpAddress+path, nil)
	n.check(err)
	response, err := client.Do(request)
	n.check(err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	n.check(err)
	return response.StatusCode, string(text)
}

// metric returns the value of a metric, by its name without the prefix, and its
// labels; "" if there is none.
func (n *testNode) metric(name string) string {
	n.t.Helper()
	_, text := n.get("/metrics")
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// checks returns how often the agent compared the kernel with the config for a
// reason and found it in sync.
func (n *testNode) checks(reason string) string {
	n.t.Helper()
	return n.metric(fmt.Sprintf("nft_masq_agent_applies_total{reason=%q,result=\"in_sync\"}", reason))
}
