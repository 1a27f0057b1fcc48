package netns_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
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

func TestCloseLeaksNothing(t *testing.T) {
	nfttest.Require(t)
	t.Setenv("TMPDIR", t.TempDir()) // others may run at the same time
	use := func() {
		top, err := nfttest.OpenTopology()
		nfttest.NoError(t, err)
		flow := nfttest.Flow{Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("198.51.100.1:5000")}
		nfttest.MustSend(t, top, flow)
		if _, err := top.Node.Output("", "true"); err != nil {
			t.Fatal(err)
		}
		nfttest.NoError(t, top.Close())
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

// current returns the name of the calling thread's network namespace.
func current(t *testing.T) string {
	t.Helper()
	name, err := os.Readlink("/proc/thread-self/ns/net")
	nfttest.NoError(t, err)
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
	nfttest.NoError(t, err)
	return found
}
