package netns_test

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

func TestCallerStaysInItsNamespace(t *testing.T) {
	before := threadNamespaces(t)
	top := nfttest.NewTopology(t)
	nfttest.Run(t, top.Node, "", "true")
	if got := current(t); !before[got] {
		t.Errorf("the test runs in %s", got)
	}
	var stayed []string
	for range 5000 { // a thread exits a moment after its goroutine
		stayed = stayed[:0]
		for ns := range threadNamespaces(t) {
			if !before[ns] {
				stayed = append(stayed, ns)
			}
		}
		if len(stayed) == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Errorf("threads stayed in %q", stayed)
}

func TestProcessStaysInItsNamespace(t *testing.T) {
	n := nfttest.NewNS(t, "other")
	// So many at the same time that the runtime uses every thread it has.
	const calls = 50
	var inside, all sync.WaitGroup
	inside.Add(calls)
	for range calls {
		all.Go(func() {
			err := n.Do(func() error {
				inside.Done()
				inside.Wait()
				if unix.Gettid() == unix.Getpid() {
					return errors.New("the main thread is in the namespace, and so is /proc/PID/ns/net")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func TestCloseLeaksNothing(t *testing.T) {
	nfttest.Require(t)
	t.Setenv("TMPDIR", t.TempDir()) // others may run at the same time
	use := func() {
		top, err := nfttest.OpenTopology()
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range namesOf(t, top.Pod, top.Node, top.Outside) {
			t.Errorf("%s is a named namespace of ours", name)
		}
		flow := nfttest.Flow{Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("198.51.100.1:5000")}
		nfttest.MustSend(t, top, flow)
		if _, err := top.Node.Output("", "true"); err != nil {
			t.Fatal(err)
		}
		if err := top.Close(); err != nil {
			t.Fatal(err)
		}
	}
	use() // so that whatever the runtime opens once is open
	descriptors := list(t, "/proc/self/fd/*")
	for range 3 {
		use()
	}
	if got := list(t, "/proc/self/fd/*"); len(got) != len(descriptors) {
		t.Errorf("%d file descriptors became %d", len(descriptors), len(got))
	}
	if got := list(t, filepath.Join(os.TempDir(), "*")); len(got) > 0 {
		t.Errorf("temporary files stayed: %q", got)
	}
}

// namesOf returns the files of /run/netns that name one of the namespaces. Those of
// others may come and go.
func namesOf(t *testing.T, namespaces ...*nfttest.NS) (names []string) {
	t.Helper()
	var ours []unix.Stat_t
	for _, n := range namespaces {
		var s unix.Stat_t
		if err := unix.Fstat(n.Fd(), &s); err != nil {
			t.Fatal(err)
		}
		ours = append(ours, s)
	}
	for _, path := range list(t, "/run/netns/*") {
		var named unix.Stat_t
		if unix.Stat(path, &named) != nil {
			continue
		}
		if slices.ContainsFunc(ours, func(s unix.Stat_t) bool { return s.Dev == named.Dev && s.Ino == named.Ino }) {
			names = append(names, path)
		}
	}
	return names
}

func TestNamespaceIsUsableAfterGoexitInside(t *testing.T) {
	n := nfttest.NewNS(t, "lone")
	ended := make(chan bool)
	go func() {
		defer close(ended)
		_ = n.Do(func() error {
			runtime.Goexit() // what t.FailNow does
			return nil
		})
		t.Error("Do returned from a function that did not")
	}()
	<-ended
	var inside string
	if err := n.Do(func() error { inside = current(t); return nil }); err != nil {
		t.Fatal(err)
	}
	if inside == current(t) {
		t.Error("Do ran the function outside the namespace")
	}
}

func TestProgramRunsInsideAndItsErrorsAreReported(t *testing.T) {
	n := nfttest.NewNS(t, "lone")
	var want string
	if err := n.Do(func() error { want = current(t); return nil }); err != nil {
		t.Fatal(err)
	}
	got := nfttest.Run(t, n, "", "readlink", "/proc/self/ns/net")
	if diff := cmp.Diff(want+"\n", got); diff != "" {
		t.Errorf("namespace (-want +got):\n%s", diff)
	}
	got = nfttest.Run(t, n, "text", "cat")
	if diff := cmp.Diff("text", got); diff != "" {
		t.Errorf("standard input (-want +got):\n%s", diff)
	}
	_, err := n.Output("", "sh", "-c", "echo why >&2; exit 3")
	if want := "lone: sh -c echo why >&2; exit 3: exit status 3\nwhy\n"; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
}

func TestProcessCanBeSignaledAndAwaited(t *testing.T) {
	n := nfttest.NewNS(t, "lone")
	p, err := n.Start(nfttest.Command("sleep", "60"))
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
		t.Fatal("exited by itself: ", p.Wait())
	default:
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if err := p.Wait(); err == nil || err.Error() != "signal: terminated" {
		t.Errorf("wait: %v", err)
	}
	if _, err := n.Start(nfttest.Command("/nowhere")); err == nil {
		t.Error("a program that does not exist was started")
	}
}

func TestAddressesHaveNoNames(t *testing.T) {
	nfttest.Require(t, "iptables-nft", "iptables-nft-restore")
	n := nfttest.NewNS(t, "lone")
	nfttest.Run(t, n, "*nat\n-A POSTROUTING -d 169.254.0.0/16 -j RETURN\nCOMMIT\n", "iptables-nft-restore")
	got := nfttest.Run(t, n, "", "iptables-nft", "-t", "nat", "-L", "POSTROUTING")
	want := `Chain POSTROUTING (policy ACCEPT)
target     prot opt source               destination         
RETURN     all  --  anywhere             169.254.0.0/16      
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("listing (-want +got):\n%s", diff)
	}
	want = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -d 169.254.0.0/16 -j RETURN
COMMIT
`
	if diff := cmp.Diff(want, nfttest.Save(t, n, "iptables-nft-save", "nat")); diff != "" {
		t.Errorf("save (-want +got):\n%s", diff)
	}
}

func TestTapCapturesWhatItsFilterAccepts(t *testing.T) {
	n := nfttest.NewNS(t, "lone")
	for _, tt := range []struct {
		name   string
		filter netns.Filter
		want   []string
	}{
		{"nothing", netns.Nothing(), nil},
		{"UDP", netns.OfProtocol(unix.IPPROTO_UDP), []string{
			"127.0.0.1 to 127.0.0.1", "::1 to ::1", "127.0.0.1 to 127.0.0.1", "::1 to ::1",
		}},
		{"UDP to the port", netns.ToPort(unix.IPPROTO_UDP, 5000), []string{"127.0.0.1 to 127.0.0.1", "::1 to ::1"}},
		{"TCP to the port", netns.ToPort(unix.IPPROTO_TCP, 5000), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tap, err := n.OpenTap(tt.filter)
			if err != nil {
				t.Fatal(err)
			}
			defer tap.Close()
			for _, dst := range []string{"127.0.0.1:5001", "[::1]:5001", "127.0.0.1:5000", "[::1]:5000"} {
				send(t, n, dst)
			}
			if diff := cmp.Diff(tt.want, arrived(t, tap)); diff != "" {
				t.Errorf("packets (-want +got):\n%s", diff)
			}
		})
	}
}

func TestBorrowedTapDiscardsOldPackets(t *testing.T) {
	n := nfttest.NewNS(t, "lone")
	for _, dst := range []string{"127.0.0.1:5000", "[::1]:5000"} {
		tap, done, err := n.BorrowTap()
		if err != nil {
			t.Fatal(err)
		}
		if err := tap.Watch(netns.OfProtocol(unix.IPPROTO_UDP)); err != nil {
			t.Fatal(err)
		}
		send(t, n, dst)
		addr := netip.MustParseAddrPort(dst).Addr().String()
		// One packet stays unread for the next borrower.
		packet, err := tap.Receive(make([]byte, 1500))
		if err != nil {
			t.Fatal(err)
		}
		if src, _, _ := netns.Addresses(packet); src.String() != addr {
			t.Errorf("packet from %s, want %s", src, addr)
		}
		send(t, n, dst)
		done()
	}
}

// send sends one UDP packet to an address of the namespace.
func send(t *testing.T, n *netns.NS, dst string) {
	t.Helper()
	conn, err := n.DialContext(t.Context(), "udp", dst)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
}

// arrived reads a tap until no more packets arrive.
func arrived(t *testing.T, tap *netns.Tap) (seen []string) {
	t.Helper()
	buf := make([]byte, 1500)
	for {
		packet, err := tap.Receive(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return seen
		}
		if err != nil {
			t.Fatal(err)
		}
		src, dst, ok := netns.Addresses(packet)
		if !ok {
			t.Fatalf("packet of %d bytes is not an IP packet", len(packet))
		}
		seen = append(seen, src.String()+" to "+dst.String())
	}
}

// current returns the name of the calling thread's network namespace.
func current(t *testing.T) string {
	t.Helper()
	name, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// threadNamespaces returns the network namespaces of all threads.
func threadNamespaces(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, path := range list(t, "/proc/self/task/*/ns/net") {
		if name, err := os.Readlink(path); err == nil { // the thread may have exited
			found[name] = true
		}
	}
	return found
}

func list(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return found
}
