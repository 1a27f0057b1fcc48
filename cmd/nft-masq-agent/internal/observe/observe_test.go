package observe

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/zap"
	captured "go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/logged"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// compareEvery is how long it takes the loop at most to notice a transaction.
const compareEvery = 250 * time.Millisecond

// A world is the loop and its observers in a synctest bubble, with channels instead of files,
// and is their kernel and node.
type world struct {
	files  chan agent.Files
	hangup chan os.Signal

	held       string     // hash of the rules in the kernel
	mu         sync.Mutex // because a firing timer does not synchronize
	refuses    error
	looks      int
	deep       int // checks of more than our rules
	rereads    int
	cost       time.Duration
	others     neighbors.Others
	surveys    int           // that began
	surveying  int           // that are running
	surveyCost time.Duration // how long one takes
	interfaces []routes.Interface
	generation uint32

	flush    func(nft.Ruleset, config.Stale, func(int, *conntrack.Judge)) Flush
	stale    atomic.Int64 // connections
	recounts atomic.Int64
	readings atomic.Int64 // of the connections
	reading  atomic.Int64 // how long a reading takes

	agent *agent.Agent
	all   []agent.Observer
	logs  *captured.ObservedLogs
}

// inBubble runs the loop; test runs while the loop waits for events.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{generation: 1, files: make(chan agent.Files), hangup: make(chan os.Signal)}
		core, logs := captured.New(zap.InfoLevel)
		w.logs = logs
		o := options.Options{Mode: nft.ModeNFTables, ConntrackInterval: time.Minute}
		lock := func() (io.Closer, error) { return io.NopCloser(nil), nil }
		w.agent = agent.New(
			agent.Inputs{
				Files: w.files, Hangup: w.hangup, Reread: func() {}, Generation: w.currentGeneration,
				Processor: func() time.Duration { return 0 },
				Lock:      lock, Later: lock, Holder: func() (int, bool) { return 0, false },
			}, w, agent.Settings{NFT: o.NFT(), LostLines: func() uint64 { return 0 }},
			zap.New(logged.DocumentedCore{Core: core, T: t}),
		)
		w.all = All(w.agent, w, o, func(nft.Policy) config.Problems { return nil })
		w.agent.Observe(w.all...)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.agent.Run(ctx)
		}()
		test(t, w)
		cancel()
		<-done
	})
}

func (w *world) Apply(_ context.Context, r nft.Ruleset, depth layout.Depth) (kernel.Applied, error) {
	w.mu.Lock()
	cost := w.cost
	w.looks++
	if depth > layout.Ours {
		w.deep++
	}
	w.mu.Unlock()
	time.Sleep(cost)
	w.mu.Lock()
	defer w.mu.Unlock()
	var a kernel.Applied
	if w.refuses != nil {
		return a, w.refuses
	}
	if w.held != r.Hash() {
		w.held = r.Hash()
		w.generation++
		a.Differences = append(a.Differences, "differs")
	}
	a.Generation = w.generation
	return a, nil
}

func (w *world) Installed(context.Context) (layout.Installed, bool, error) {
	return layout.Installed{}, false, nil
}

func (w *world) OlderDecides(context.Context) (bool, error) { return false, nil }

func (w *world) Counters(nft.Layout) ([]nft.Counts, error) {
	return []nft.Counts{
		{Verdict: nft.Masqueraded, Packets: 3},
		{IPv6: true, Verdict: nft.Exempt, Packets: 2},
		{Verdict: nft.Invalid, Packets: 7},
	}, nil
}

func (w *world) Interfaces() (all []routes.Interface, err error) {
	w.locked(func() { all = w.interfaces })
	return all, nil
}

func (w *world) XTables() (found []older.XTable, err error) {
	w.locked(func() { found = w.others.XTables })
	return found, nil
}

// find sets other programs' rules on the node.
func (w *world) find(o neighbors.Others) { w.locked(func() { w.others = o }) }

func (w *world) refuse(err error) { w.locked(func() { w.refuses = err }) }

func (w *world) currentGeneration() (generation uint32, err error) {
	w.locked(func() { generation = w.generation })
	return generation, nil
}

func (w *world) Pressure(conntrack.Ports) (conntrack.Pressure, error) {
	w.readings.Add(1)
	time.Sleep(time.Duration(w.reading.Load()))
	return conntrack.Pressure{
		Stats:   conntrack.Stats{Entries: 7, Limit: 1000, InsertFailed: 3, Drop: 2},
		Fullest: map[conntrack.PortGroup]float64{{Protocol: unix.IPPROTO_UDP}: 0.5},
	}, nil
}

func (w *world) Stale(ctx context.Context, _ nft.Ruleset) (conntrack.Stale, error) {
	if err := ctx.Err(); err != nil {
		return conntrack.Stale{}, err
	}
	w.recounts.Add(1)
	return conntrack.Stale{Count: int(w.stale.Load())}, nil
}

func (w *world) Flush(r nft.Ruleset, which config.Stale, listed func(int, *conntrack.Judge)) Flush {
	return w.flush(r, which, listed)
}

func (w *world) Others(_ context.Context, _ nft.Ruleset) (neighbors.Others, error) {
	w.mu.Lock()
	w.surveys++
	w.surveying++
	others, cost := w.others, w.surveyCost
	if w.surveying > 1 {
		others = neighbors.Others{Unread: w.surveying} // as seen in the log
	}
	w.mu.Unlock()
	time.Sleep(cost)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.surveying--
	return others, w.refuses
}

// locked calls a function that uses fields: a firing timer does not synchronize.
func (w *world) locked(use func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	use()
}

// file is a config that exempts one network.
func file(cidr string) agent.Files {
	return agent.Files{Sources: []config.Source{{Name: "config", Data: []byte("nonMasqueradeCIDRs: [" + cidr + "]\n")}}}
}

// commit is a transaction of another program.
func (w *world) commit() {
	synctest.Wait() // for the loop
	w.mu.Lock()
	w.generation++
	w.mu.Unlock()
}

// pass lets time pass, and what is due then happen.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// gets gives a config to the agent.
func (w *world) gets(f agent.Files) {
	w.files <- f
	synctest.Wait()
}

// settled starts with a file that exempts 10.0.0.0/8.
func (w *world) settled(t *testing.T) {
	t.Helper()
	w.gets(file("10.0.0.0/8"))
	w.messages()
	w.locked(func() { w.looks, w.rereads = 0, 0 })
}

func (w *world) messages() []string {
	var out []string
	for _, e := range w.logs.TakeAll() {
		out = append(out, e.Message)
	}
	return out
}

func wantLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

// tamper changes our rules.
func (w *world) tamper() {
	w.mu.Lock() // a resync may be running
	w.held = "tampered"
	w.mu.Unlock()
	w.commit()
}

// metrics scrapes the metrics.
func (w *world) metrics(t *testing.T) string {
	t.Helper()
	r := httptest.NewRecorder()
	w.agent.Handler().ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if r.Code != http.StatusOK {
		t.Fatalf("status %d: %s", r.Code, r.Body)
	}
	return r.Body.String()
}

const metricPrefix = "nft_masq_agent_"

// wantMetrics compares the metrics with these names.
func wantMetrics(t *testing.T, w *world, want string, names ...string) {
	t.Helper()
	var kept strings.Builder
	for line := range strings.Lines(w.metrics(t)) {
		line, ours := strings.CutPrefix(line, metricPrefix)
		if ours && slices.Contains(names, line[:strings.IndexAny(line, "{ ")]) {
			kept.WriteString(line)
		}
	}
	if diff := cmp.Diff(want, kept.String()); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// own returns the metrics without those of Go and the process, with their labels.
func own(t *testing.T, w *world) map[string][]string {
	t.Helper()
	text, all := w.metrics(t), map[string][]string{}
	for _, m := range regexp.MustCompile("(?m)^# TYPE "+metricPrefix+"([a-z_]+) ").FindAllStringSubmatch(text, -1) {
		name := metricPrefix + m[1]
		all[name] = nil
		sample := regexp.MustCompile("(?m)^" + name + `\{(.*)\} `).FindStringSubmatch(text)
		if sample == nil {
			continue
		}
		for _, label := range regexp.MustCompile(`([a-z_]+)="`).FindAllStringSubmatch(sample[1], -1) {
			all[name] = append(all[name], label[1])
		}
	}
	return all
}

// everything makes an agent export all its metrics.
func everything(t *testing.T, test func(t *testing.T, w *world)) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		test(t, w)
	})
}

func TestMetricsAreLintClean(t *testing.T) {
	everything(t, func(t *testing.T, w *world) {
		problems, err := promlint.New(strings.NewReader(w.metrics(t))).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			if strings.HasPrefix(p.Metric, metricPrefix) {
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	})
}

func TestReadmeOfTheManifestsListsTheMetrics(t *testing.T) {
	text, err := os.ReadFile("../../../../manifests/README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "<!-- metrics -->")
	table, _, ended := strings.Cut(table, "<!-- /metrics -->")
	if !found || !ended {
		t.Fatal("manifests/README.md has no section metrics")
	}
	listed := map[string][]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)(?:\\{([a-z,]+)\\})?` \\|").FindAllStringSubmatch(table,
		-1) {
		var labels []string
		if row[2] != "" {
			labels = strings.Split(row[2], ",")
			slices.Sort(labels)
		}
		listed[row[1]] = labels
	}
	everything(t, func(t *testing.T, w *world) {
		if diff := cmp.Diff(own(t, w), listed); diff != "" {
			t.Errorf("metrics (-program +README):\n%s", diff)
		}
	})
}

// legacy is the leftovers of an older agent.
func legacy() neighbors.Others {
	id := nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}
	return neighbors.Others{Legacy: []older.Chain{{ChainID: id, Rules: 2}}}
}

func TestRulesOfOlderAgentsAreLoggedWhenTheyAppearAndVanish(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.others = legacy()
		w.gets(file("10.0.0.0/8"))
		wantLines(t, w.messages(), "starting", "applied",
			"rules of an iptables-based agent are also active: stop it, and run with --takeover or cleanup --legacy-only")
		for range 3 {
			w.commit()
			time.Sleep(time.Minute)
		}
		synctest.Wait()
		wantLines(t, w.messages())
		w.others = neighbors.Others{}
		w.commit()
		pass(time.Minute)
		wantLines(t, w.messages(), "the rules of iptables-based agents are gone")
	})
}

func TestConflictsAreLoggedOnceAndManyInOneLine(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		handle := uint64(0)
		conflicts := func(table string, n int) {
			for i := range n {
				handle++
				r := nfnetlink.Rule{Table: table, Chain: fmt.Sprintf("CNI-%d", i), Handle: handle}
				w.others.Conflicts = append(w.others.Conflicts, conflict(r, "POSTROUTING"))
			}
		}
		lookAgain := func() {
			w.commit()
			pass(time.Minute)
		}
		const one = "another program's rule masquerades what the config exempts"
		conflicts("nat", maxLogged+2)
		conflicts("other", 1)
		w.gets(file("10.0.0.0/8"))
		wantLines(t, w.messages(), append(append([]string{"starting", "applied"}, slices.Repeat([]string{one}, maxLogged)...),
			"more rules of other programs contradict the config; see nft-masq-agent status")...)
		// The same rules again, with different handles, and one more.
		w.others = neighbors.Others{}
		conflicts("other", 1)
		conflicts("nat", maxLogged+3)
		lookAgain()
		wantLines(t, w.messages(), one)
		// The same rule for another reason.
		w.others.Conflicts[0].Open = []string{"meta mark 0x1"}
		lookAgain()
		wantLines(t, w.messages(), one)
	})
}

func TestConfigChangeChecksForConflictsAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		pass(time.Minute)
		w.messages()
		w.others = neighbors.Others{Conflicts: one("nat")}
		w.gets(file("100.64.0.0/10"))
		wantLines(t, w.messages(), "applied", "another program's rule masquerades what the config exempts")
	})
}
