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
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// long says that the tests may take as long as it takes to prove their point.
var long = os.Getenv("LONG") == "1"

// patience is how long something may take that has to happen. Only a test that
// fails waits for so long.
const patience = 30 * time.Second

// modes are those in which every claim about the kernel holds.
var modes = []nft.Mode{nft.ModeNFTables, nft.ModeIPTables}

// How the program finds its surroundings when a test runs it.
const (
	// withCaps leaves it these capabilities alone, by their numbers in JSON.
	withCaps = "NFT_MASQ_AGENT_TEST_CAPS"
	// withMount bind-mounts the file before the colon over that behind it.
	withMount = "NFT_MASQ_AGENT_TEST_MOUNT"
)

// prepare makes the surroundings in which a test wants to see the program. Its
// mount namespace is its own.
func prepare() {
	if from, to, ok := strings.Cut(os.Getenv(withMount), ":"); ok {
		must(unix.Mount(from, to, "", unix.MS_BIND, ""))
	}
	list, ok := os.LookupEnv(withCaps)
	if !ok {
		return
	}
	var keep []uintptr
	must(json.Unmarshal([]byte(list), &keep))
	runtime.LockOSThread() // capabilities are a thread's
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if !slices.Contains(keep, c) {
			// EINVAL: a kernel that does not know the last ones.
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); !errors.Is(err, unix.EINVAL) {
				must(err)
			}
		}
	}
	must(os.Unsetenv(withCaps))
	must(os.Unsetenv(withMount))
	must(unix.Exec("/proc/self/exe", os.Args, os.Environ()))
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// A node is a network namespace with the config of its agent.
type node struct {
	*nfttest.NS
	t    testing.TB
	path string // of the config; nothing is there at first but its directory
}

func newNode(t testing.TB) *node {
	t.Helper()
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	return nodeIn(t, nfttest.NewNS(t, "node"))
}

func nodeIn(t testing.TB, ns *nfttest.NS) *node {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "config")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return &node{ns, t, filepath.Join(dir, "ip-masq-agent")}
}

func (n *node) check(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// write writes the config in place.
func (n *node) write(text string) {
	n.t.Helper()
	n.check(os.WriteFile(n.path, []byte(text), 0o644))
}

// swap replaces the config by a rename.
func (n *node) swap(text string) {
	n.t.Helper()
	temporary := n.path + ".new"
	n.check(os.WriteFile(temporary, []byte(text), 0o644))
	n.check(os.Rename(temporary, n.path))
}

// connect gives a connection to nf_tables in the namespace. The caller closes
// it.
func (n *node) connect() *nfnetlink.Conn {
	return nfnetlink.New(func() (nl *netlink.Conn, err error) {
		err = n.Do(func() error {
			nl, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
			return err
		})
		return nl, err
	})
}

// kernel gives the kernel as a new process sees it: nothing is remembered. The
// caller closes it.
func (n *node) kernel() *kernel.Kernel { return kernel.New(n.connect()) }

func (n *node) generation() uint32 {
	n.t.Helper()
	c := n.connect()
	defer c.Close()
	g, err := c.Generation()
	n.check(err)
	return g
}

// differences says how the kernel is not as wanted, whatever its mode. An error
// counts as one: somebody may be writing.
func (n *node) differences(want nft.Ruleset) []string {
	k := n.kernel()
	defer k.Close()
	diffs, err := k.Diff(want, kernel.Look{Full: true, Others: true})
	if err != nil {
		diffs = append(diffs, err.Error())
	}
	return diffs
}

// holds fails the test where the kernel does not hold just what is wanted.
func (n *node) holds(want nft.Ruleset) {
	n.t.Helper()
	for _, d := range n.differences(want) {
		n.t.Errorf("the kernel differs: %s", d)
	}
}

// listen calls do with each change of the ruleset until the returned function
// is called, or the test ends.
func (n *node) listen(do func(nfnetlink.Change)) (stop func()) {
	n.t.Helper()
	var l *nfnetlink.Listener
	n.check(n.Do(func() (err error) {
		l, err = nfnetlink.Listen()
		return err
	}))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Receive()
			if err != nil {
				return
			}
			do(c)
		}
	}()
	stop = sync.OnceFunc(func() {
		_ = l.Close()
		<-ended
	})
	n.t.Cleanup(stop)
	return stop
}

// optionsOf gives what flags of run say.
func optionsOf(t testing.TB, args ...string) options.Options {
	t.Helper()
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	o := options.AddRunFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return *o
}

// wants compiles a text as the program with these flags does; "" gives the
// defaults.
func wants(t testing.TB, text string, args ...string) nft.Ruleset {
	t.Helper()
	o := optionsOf(t, args...)
	c, _, err := config.Parse(o.Defaults(), config.Source{Name: "config", Data: []byte(text)})
	if err != nil {
		t.Fatal(err)
	}
	return nft.Compile(c, o.NFT())
}

// command makes the command that runs the program.
func (n *node) command(env []string, args ...string) *exec.Cmd {
	n.t.Helper()
	self, err := os.Executable()
	n.check(err)
	cmd := nfttest.Command(self, args...)
	cmd.Env = append(append(os.Environ(), asMain+"=1"), env...)
	return cmd
}

// run runs a command of the program on the node.
func (n *node) run(args ...string) result {
	n.t.Helper()
	cmd := n.command(nil, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var ended *exec.ExitError
	if err := n.Run(cmd); err != nil && !errors.As(err, &ended) {
		n.t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// A daemon is a running agent.
type daemon struct {
	logbook
	*node
	args    []string
	process *nfttest.Process
	stderr  *bytes.Buffer // to be read when it has ended
}

// start starts an agent on the node's config.
func (n *node) start(args ...string) *daemon {
	n.t.Helper()
	return n.startIn(nil, args...)
}

func (n *node) startIn(env []string, args ...string) *daemon {
	n.t.Helper()
	return n.startCommand(n.command(env, append([]string{"run", "--log-format", "json", "--config", n.path}, args...)...))
}

func (n *node) startCommand(cmd *exec.Cmd) *daemon {
	n.t.Helper()
	d := &daemon{node: n, args: cmd.Args[1:], stderr: new(bytes.Buffer)}
	d.changed = make(chan struct{})
	cmd.Stdout, cmd.Stderr = &d.logbook, d.stderr
	var err error
	d.process, err = n.Start(cmd)
	n.check(err)
	n.t.Cleanup(func() {
		_ = d.process.Kill()
		<-d.process.Done()
		if n.t.Failed() {
			n.t.Logf("the agent %d said:\n%s%s", d.process.Pid, &d.logbook, d.stderr)
		}
	})
	return d
}

// signal sends a signal.
func (d *daemon) signal(s unix.Signal) {
	d.t.Helper()
	d.check(d.process.Signal(s))
}

// stop ends the agent as a rolling update does.
func (d *daemon) stop() {
	d.t.Helper()
	d.signal(unix.SIGTERM)
	d.ended()
}

// ended holds that the agent ends, with exit code 0 and no word.
func (d *daemon) ended() {
	d.t.Helper()
	select {
	case <-d.process.Done():
	case <-time.After(patience):
		d.t.Fatal("the agent does not end")
	}
	if err := d.process.Wait(); err != nil || d.stderr.Len() > 0 {
		d.t.Fatalf("the agent ended with %v: %s", err, d.stderr)
	}
}

// await gives the first line of the log whose message begins with the words and
// that was not awaited before.
func (d *daemon) await(words string) logLine {
	d.t.Helper()
	late := time.After(patience)
	for {
		line, changed := d.next(words)
		if line != nil {
			return line
		}
		select {
		case <-changed:
		case <-d.process.Done():
			if line, _ := d.next(words); line != nil {
				return line
			}
			d.t.Fatalf("the agent ended and never said %q", words)
		case <-late:
			d.t.Fatalf("the agent never said %q", words)
		}
	}
}

// silent fails the test where the log has lines that were not awaited.
func (d *daemon) silent() {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, line := range d.unread {
		if !line.hidden() && line["event"] != "exiting" {
			d.t.Errorf("the agent said, too: %v", line)
		}
	}
}

// anotherAgent is said, too, of agents outside the test by one that may not see
// in which namespace they are.
const anotherAgent = "another agent runs in this network namespace"

// hidden says whether a line is about a process that cannot be looked at, or
// that is gone.
func (l logLine) hidden() bool {
	if !strings.HasPrefix(l.message(), anotherAgent) {
		return false
	}
	_, err := os.Readlink(fmt.Sprintf("/proc/%v/ns/net", l["pid"]))
	return err != nil
}

// forgive takes lines that say what a test cannot rule out.
func (d *daemon) forgive(words string) {
	for line, _ := d.next(words); line != nil; line, _ = d.next(words) {
	}
}

// until waits for something that no line of the log tells.
func (d *daemon) until(what string, holds func() bool) {
	d.t.Helper()
	late := time.After(patience)
	for !holds() {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-d.process.Done():
			d.t.Fatalf("the agent ended before %s", what)
		case <-late:
			d.t.Fatalf("%s never comes", what)
		}
	}
}

// applied awaits that the agent has written what a text wants, and holds that
// the kernel has it.
func (d *daemon) applied(reason string, want nft.Ruleset) logLine {
	d.t.Helper()
	line := d.await("applied")
	if line["reason"] != reason || line["hash"] != want.Hash() {
		d.t.Errorf("applied %v, want reason %s and config %s", line, reason, want.Hash())
	}
	d.holds(want)
	return line
}

// began awaits that the agent has started, and has written what is wanted.
func (d *daemon) began(want nft.Ruleset) {
	d.t.Helper()
	d.await("starting")
	d.answers()
	d.applied("start", want)
}

// answers awaits that an agent told to do so answers HTTP.
func (d *daemon) answers() {
	d.t.Helper()
	if slices.Contains(d.args, "--http-address") {
		d.await("answering HTTP")
	}
}

// A logbook takes in what an agent logs.
type logbook struct {
	mu      sync.Mutex
	changed chan struct{} // closed when there is more
	partial []byte
	lines   []logLine
	unread  []logLine // that nobody has awaited yet
}

// A logLine is a line of the log.
type logLine map[string]any

func (l logLine) message() string { return l.text("msg") }

func (l logLine) text(key string) string {
	s, _ := l[key].(string)
	return s
}

// texts joins a list of texts.
func (l logLine) texts(key string) string {
	list, _ := l[key].([]any)
	return fmt.Sprint(list...)
}

// Write implements [io.Writer].
func (b *logbook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.partial = append(b.partial, p...)
	for {
		line, rest, ended := bytes.Cut(b.partial, []byte("\n"))
		if !ended {
			break
		}
		var l logLine
		if err := json.Unmarshal(line, &l); err != nil {
			l = logLine{"msg": "no JSON: " + string(line)}
		}
		b.lines, b.unread, b.partial = append(b.lines, l), append(b.unread, l), rest
	}
	close(b.changed)
	b.changed = make(chan struct{})
	return len(p), nil
}

// next takes the first line whose message begins with the words, or gives nil
// and what is closed when there are more.
func (b *logbook) next(words string) (line logLine, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, l := range b.unread {
		if strings.HasPrefix(l.message(), words) {
			b.unread = slices.Delete(b.unread, i, i+1)
			return l, nil
		}
	}
	return nil, b.changed
}

// count counts the lines whose message begins with the words.
func (b *logbook) count(words string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, l := range b.lines {
		if strings.HasPrefix(l.message(), words) {
			n++
		}
	}
	return n
}

// String gives the last lines.
func (b *logbook) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var s strings.Builder
	for _, l := range b.lines[max(0, len(b.lines)-25):] {
		text, _ := json.Marshal(l)
		fmt.Fprintf(&s, "%s\n", text)
	}
	return s.String()
}

// httpAddress is where the agents of tests answer, in their own namespaces.
const httpAddress = "127.0.0.1:9717"

// get asks the agent that answers HTTP on the node.
func (n *node) get(path string) (code int, body string) {
	n.t.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: n.DialContext, DisableKeepAlives: true}, Timeout: patience}
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+httpAddress+path, nil)
	n.check(err)
	response, err := client.Do(request)
	n.check(err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	n.check(err)
	return response.StatusCode, string(text)
}

// metric gives the value of a metric, by its name behind the prefix and its
// labels; "" where it is not there.
func (n *node) metric(name string) string {
	n.t.Helper()
	_, text := n.get("/metrics")
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// looks gives how often the agent held the kernel against the config for a
// reason and found it in step.
func (n *node) looks(reason string) string {
	n.t.Helper()
	return n.metric(fmt.Sprintf("nft_masq_agent_applies_total{reason=%q,result=\"in_step\"}", reason))
}
