// Package loop has what the loop of the agent sees in tests: the kernel, the files and the addresses of a node. It is in
// a synctest bubble, where hours pass at once.
package loop

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	captured "go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/xtables"
)

// An Agent is the loop.
type Agent interface {
	Run(context.Context)
	Ready() error
	Handler() http.Handler
}

// A World is the kernel of a loop, and what else it reads.
type World struct {
	*testing.T
	Agent    Agent
	Observed bool // by observers, which log at the same time
	Logs     *captured.ObservedLogs
	Options  nft.Options
	Deliver  func([]config.Source, error) // a content of the config
	Hangup   chan os.Signal
	Moves    chan node.Change // of addresses
	End      func()

	mu        sync.Mutex
	Held      string // hash of the rules in the kernel, and the addresses of the node in them
	Exchanged bool   // an element of a set was
	Writes    []string
	Rejects   error
	Left      *nft.Installed // by a previous run
	Older     []xtables.OlderChain
	Listed    []netip.Addr // addresses of the node, unless Unlisted is an error
	Unlisted  error
	Counts    []nft.Counts
	CountsErr error
	Other     int // the process that has the lock, 0 for none
	Late      int // the process of an agent that came later, 0 for none

	Looks, Frames, Deep int // checks with the elements of sets, without, and of more than our rules
	Rereads, Follows    int
	Last                nft.Depth
	Cost, FrameCost     time.Duration // of these checks
	Stall               time.Duration // of each check, without processor time
	Used                time.Duration // processor time
	Ends                bool          // the loop, during the next check

	ruleset uint32            // its generation
	names   map[string]string // of policies, by hash
	told    string            // the last state that a script has shown
	wrote   int               // how many writes it has shown
}

// Run tests a loop in a bubble. test runs while the loop waits for events.
func Run(t *testing.T, start func(*World, *zap.Logger) Agent, test func(*World)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		core, logs := captured.New(zap.InfoLevel)
		w := &World{
			T: t, Logs: logs, Hangup: make(chan os.Signal), Moves: make(chan node.Change, 1), ruleset: 1,
			names: map[string]string{},
			Counts: []nft.Counts{
				{Verdict: nft.Masqueraded, Packets: 3},
				{IPv6: true, Verdict: nft.Exempt, Packets: 2},
				{Verdict: nft.Invalid, Packets: 7},
			},
		}
		w.Agent = start(w, zap.New(DocumentedCore{Core: core, T: t}))
		ctx, cancel := context.WithCancel(t.Context())
		w.End = cancel
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.Agent.Run(ctx)
		}()
		test(w)
		cancel()
		<-done
	})
}

// Locked calls a function that uses fields: a firing timer does not synchronize.
func (w *World) Locked(use func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	use()
}

// Apply is that of a [kernel.Kernel].
func (w *World) Apply(_ context.Context, r nft.Ruleset, depth nft.Depth) (a kernel.Applied, err error) {
	w.mu.Lock()
	cost := w.Cost
	switch w.Last = depth; {
	case depth == nft.Frame:
		cost = w.FrameCost
		w.Frames++
	case depth > nft.Contents:
		w.Deep++
		fallthrough
	default:
		w.Looks++
	}
	w.Used += cost
	cost += w.Stall
	if w.Ends {
		w.End()
	}
	w.mu.Unlock()
	time.Sleep(cost)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.Rejects != nil {
		if w.Held != r.Hash() {
			a.Differences = []string{"differs"}
		}
		return a, w.Rejects
	}
	a.Read = w.ruleset
	if depth == nft.TakeOver {
		for _, c := range w.Older {
			a.TookOver = append(a.TookOver, c.String())
		}
		w.Older = nil
	}
	a.Differences = slices.Clone(a.TookOver)
	holds := r.Hash()
	if present := r.Policy.Families[0].SNATAddresses().Present; len(present) > 0 {
		holds += fmt.Sprint(" ", present)
	}
	if w.Held != holds || w.Exchanged && depth > nft.Frame {
		w.Held, w.Exchanged = holds, false
		w.Writes = append(w.Writes, holds)
		w.ruleset++
		a.Differences = append(a.Differences, "differs")
	}
	a.Generation = w.ruleset
	return a, nil
}

// Installed is that of a [kernel.Kernel].
func (w *World) Installed(context.Context) (left nft.Installed, found bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.Left == nil {
		return left, false, w.Rejects
	}
	return *w.Left, true, w.Rejects
}

// OlderDecides is that of a [kernel.Kernel].
func (w *World) OlderDecides(context.Context) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.Older, xtables.OlderChain.Decides), w.Rejects
}

// Counters is that of a [kernel.Kernel].
func (w *World) Counters(nft.Layout) ([]nft.Counts, error) { return w.Counts, w.CountsErr }

// Generation returns that of the ruleset.
func (w *World) Generation() (uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ruleset, nil
}

// Processor returns the processor time that checks took.
func (w *World) Processor() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Used
}

// Addresses lists those of the node.
func (w *World) Addresses() ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Listed, w.Unlisted
}

// Follow follows them.
func (w *World) Follow(context.Context) <-chan node.Change {
	w.Follows++
	return w.Moves
}

// Reread counts.
func (w *World) Reread() { w.Locked(func() { w.Rereads++ }) }

// Lock takes the lock of the network namespace, unless another process has it.
func (w *World) Lock() (io.Closer, error) {
	if w.Other != 0 {
		return nil, unix.EADDRINUSE
	}
	return io.NopCloser(nil), nil
}

// Holder returns the other process that has the lock.
func (w *World) Holder() (int, bool) { return w.Other, w.Other != 0 }

// Latecomer returns the process of an agent that came later.
func (w *World) Latecomer() (int, bool) { return w.Late, w.Late != 0 }

// File is a config that exempts some networks.
func File(cidrs string) []config.Source {
	return []config.Source{{Name: "config", Data: []byte("nonMasqueradeCIDRs: [" + cidrs + "]\n")}}
}

// Gets gives a config to the loop.
func (w *World) Gets(cidrs string) {
	w.Deliver(File(cidrs), nil)
	synctest.Wait()
}

// Settle starts with a file that exempts 10.0.0.0/8.
func (w *World) Settle() {
	w.Gets("10.0.0.0/8")
	w.Messages()
	w.Locked(func() { w.Looks, w.Rereads = 0, 0 })
}

// Commit is a transaction of another program.
func (w *World) Commit() {
	synctest.Wait() // for the loop
	w.Locked(func() { w.ruleset++ })
}

// Tamper is one that changes our rules.
func (w *World) Tamper() {
	w.Locked(func() { w.Held = "tampered" }) // a resync may be running
	w.Commit()
}

// Reject makes the kernel return an error, or none.
func (w *World) Reject(err error) { w.Locked(func() { w.Rejects = err }) }

// Pass lets time pass, and what is due then happen.
func (w *World) Pass(d time.Duration) {
	w.Locked(func() {}) // what the test has read comes before what the loop then writes
	time.Sleep(d)
	synctest.Wait()
}

// Next is time next to a program that commits every so often.
func (w *World) Next(d, every time.Duration) {
	for begun := time.Now(); time.Since(begun) < d; time.Sleep(min(every, d)) {
		w.Commit()
	}
	synctest.Wait()
}

// Messages returns the log since the last call.
func (w *World) Messages() (all []string) {
	for _, e := range w.Logs.TakeAll() {
		all = append(all, e.Message)
	}
	return all
}

// WantLines compares the log since the last call.
func (w *World) WantLines(want ...string) {
	w.Helper()
	nfttest.Same(w, "log (-want +got)", want, w.Messages())
}

// Get sends a request to the handler of a loop and returns status and text.
func Get(t *testing.T, a Agent, path string) (int, string) {
	t.Helper()
	r := httptest.NewRecorder()
	a.Handler().ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return r.Code, r.Body.String()
}

// MetricPrefix is that of our metrics.
const MetricPrefix = "nft_masq_agent_"

// Metrics returns the lines of a scrape about the metrics with these names.
func (w *World) Metrics(names ...string) (lines []string) {
	w.Helper()
	code, text := Get(w.T, w.Agent, "/metrics")
	if code != http.StatusOK {
		w.Fatalf("status %d: %s", code, text)
	}
	for line := range strings.Lines(text) {
		line, ours := strings.CutPrefix(strings.TrimSuffix(line, "\n"), MetricPrefix)
		if ours && slices.Contains(names, line[:strings.IndexAny(line, "{ ")]) {
			lines = append(lines, line)
		}
	}
	return lines
}
