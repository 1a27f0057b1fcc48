package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/xtables"
)

// A world is the loop in a synctest bubble, with channels instead of files, and is
// its kernel.
type world struct {
	files   chan Files
	changes chan Heard
	hangup  chan os.Signal
	rereads int

	held       string // hash of the rules in the kernel
	left       *layout.Installed
	mu         sync.Mutex // because a firing timer does not synchronize
	refuses    error
	writes     []string // hashes, in the order of the writes
	looks      int
	last       layout.Depth
	cost       time.Duration
	others     kernel.Others
	surveys    int           // that began
	surveying  int           // that are running
	surveyCost time.Duration // how long one takes
	interfaces []node.Interface
	addresses  []netip.Addr
	unlisted   error
	moves      chan node.Change
	follows    int

	flush    func(nft.Ruleset, config.Stale, func(int, *conntrack.Judge)) Flush
	stale    atomic.Int64 // connections
	recounts atomic.Int64
	readings atomic.Int64 // of the connections
	reading  atomic.Int64 // how long a reading takes

	counts    []nft.Counts
	countsErr error

	generation   uint32
	comparisons  int
	joined       bool
	joins        int
	listened     bool // during the last check
	cannotListen error

	agent *Agent
	logs  *observer.ObservedLogs
}

const ownPort = 4711

func testOptions() options.Options {
	return options.Options{ConfigPath: "/etc/config/ip-masq-agent", Mode: nft.ModeNFTables, ConntrackInterval: time.Minute}
}

// inBubble runs the loop; test runs while the loop waits for events.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) { bubble(t, false, test) }

func bubble(t *testing.T, takeOver bool, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{generation: 1, files: make(chan Files), changes: make(chan Heard), moves: make(chan node.Change), hangup: make(chan os.Signal)}
		core, logs := observer.New(zap.InfoLevel)
		w.logs = logs
		o := testOptions()
		o.TakeOver = takeOver
		w.agent = New(
			Inputs{
				Files: w.files, Hangup: w.hangup, Reread: func() { w.rereads++ },
				Changes: w.changes, Join: w.join, Leave: func() { w.joined = false },
				Generation: w.currentGeneration,
				Addresses:  w.listed,
				Follow: func(context.Context) <-chan node.Change {
					w.follows++
					return w.moves
				},
				Interfaces: func() ([]node.Interface, error) { return w.interfaces, nil },
				Pressure:   w.pressure,
			},
			w,
			Settings{Options: o, Version: "test"},
			zap.New(core),
		)
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

func (w *world) pressure() (conntrack.Pressure, error) {
	w.readings.Add(1)
	time.Sleep(time.Duration(w.reading.Load()))
	return conntrack.Pressure{
		Stats:   conntrack.Stats{Entries: 7, Limit: 1000, InsertFailed: 3, Drop: 2},
		Fullest: map[conntrack.PortGroup]int{{Protocol: unix.IPPROTO_UDP}: 32256},
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

func (w *world) PortID() uint32 { return ownPort }

func (w *world) Older(context.Context) (kernel.Others, error) { return w.seen(), w.refusal() }

func (w *world) XTables() ([]foreign.XTable, error) { return w.seen().XTables, nil }

func (w *world) Apply(_ context.Context, r nft.Ruleset, depth layout.Depth) (kernel.Applied, error) {
	w.last, w.listened = depth, w.joined
	w.mu.Lock()
	w.looks++
	w.mu.Unlock()
	time.Sleep(w.cost)
	if err := w.refusal(); err != nil {
		return kernel.Applied{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var a kernel.Applied
	if depth == layout.TakeOver {
		for _, c := range w.others.Legacy {
			a.TookOver = append(a.TookOver, c.String())
		}
		w.others.Legacy = nil
	}
	a.Differences = slices.Clone(a.TookOver)
	holds := r.Hash()
	if present := r.Policy.SNATOf(false).Present; len(present) > 0 {
		holds += fmt.Sprint(" ", present)
	}
	if w.held != holds {
		w.held = holds
		w.writes = append(w.writes, w.held)
		w.generation++
		a.Differences = append(a.Differences, "differs")
	}
	a.Generation = w.generation
	return a, nil
}

func (w *world) Cleanup(_ context.Context, _ kernel.Removal) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held = ""
	return nil, nil
}

func (w *world) seen() kernel.Others {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.others
}

func (w *world) Others(_ context.Context, _ nft.Ruleset) (kernel.Others, error) {
	w.mu.Lock()
	w.surveys++
	w.surveying++
	others, cost := w.others, w.surveyCost
	if w.surveying > 1 {
		others = kernel.Others{Unread: w.surveying} // as seen in the log
	}
	w.mu.Unlock()
	time.Sleep(cost)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.surveying--
	return others, w.refuses
}

// find sets other programs' rules on the node.
func (w *world) find(o kernel.Others) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.others = o
}

func (w *world) currentGeneration() (uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.comparisons++
	return w.generation, nil
}

func (w *world) join() error {
	w.joins++
	w.joined = w.cannotListen == nil
	return w.cannotListen
}

func (w *world) Counters(nft.Layout) ([]nft.Counts, error) {
	if w.countsErr != nil {
		return nil, w.countsErr
	}
	return w.counts, nil
}

func (w *world) Installed(context.Context) (layout.Installed, bool, error) {
	if w.left == nil {
		return layout.Installed{}, false, w.refusal()
	}
	return *w.left, true, w.refusal()
}

func (w *world) refuse(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuses = err
}

func (w *world) refusal() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.refuses
}

// file is a config that exempts one network.
func file(cidr string) Files {
	return Files{Sources: []config.Source{{Name: "config", Data: []byte("nonMasqueradeCIDRs: [" + cidr + "]\n")}}}
}

func hashOf(t *testing.T, f Files) string {
	t.Helper()
	c, problems := config.Parse(config.Defaults{}, f.Sources...)
	if err := problems.Err(); err != nil {
		t.Fatal(err)
	}
	return nft.Compile(c, testOptions().NFT()).Hash()
}

// commit is a transaction of a program.
func (w *world) commit(c nfnetlink.Change) {
	w.mu.Lock()
	w.generation++
	c.ID = w.generation
	w.mu.Unlock()
	if w.joined {
		w.changes <- Heard{Change: c}
	}
	synctest.Wait()
}

// noticed is a transaction that the agent has noticed, by listening or polling.
func (w *world) noticed(c nfnetlink.Change) {
	w.commit(c)
	time.Sleep(compareEvery)
	synctest.Wait()
}

// tamper changes our rules.
func (w *world) tamper(writer uint32) {
	w.mu.Lock() // a resync may be running
	w.held = "tampered"
	w.mu.Unlock()
	w.commit(nfnetlink.Change{Generation: nfnetlink.Generation{Process: "vandal"}, Writer: writer})
}

// settled runs the whole start phase, with a file that exempts 10.0.0.0/8: after
// that the agent listens.
func (w *world) settled(t *testing.T) {
	t.Helper()
	w.files <- file("10.0.0.0/8")
	time.Sleep(startPhase + time.Millisecond)
	synctest.Wait()
	if !w.joined {
		t.Fatal("does not listen after the start phase")
	}
	w.messages()
	w.looks, w.rereads, w.comparisons = 0, 0, 0
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

func TestStartAppliesTheFileAndLogsItOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages(), "starting", "applied")
		w.files <- file("11.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages(), "applied")
		if err := w.agent.Ready(); err != nil {
			t.Errorf("not ready: %v", err)
		}
	})
}

func TestQuietResyncLogsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		w.messages()
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		// In the start phase our table is also read every ten seconds; the last
		// time when it ends.
		if w.looks < 1+10+11 || w.looks > 1+10+12 || w.rereads != 10 || len(w.writes) != 1 {
			t.Errorf("%d looks, %d rereads, %d writes; want 22 or 23, 10, 1", w.looks, w.rereads, len(w.writes))
		}
		wantLines(t, w.messages())
	})
}

func TestBadEditKeepsLastGoodRules(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		good := file("10.0.0.0/8")
		w.files <- good
		synctest.Wait()
		w.messages()
		w.files <- file("10.0.0.1/8")
		synctest.Wait()
		wantLines(t, w.messages(), "config rejected; last good config ("+hashOf(t, good)+") stays enforced")
		if err := w.agent.Ready(); err == nil || !strings.Contains(err.Error(), "config:1:") {
			t.Errorf("ready returns %v, which does not name the position", err)
		}
		w.tamper(1)
		time.Sleep(compareEvery)
		synctest.Wait()
		if w.held != hashOf(t, good) {
			t.Error("the last good rules are no longer enforced")
		}
	})
}

func TestFixedConfigIsLoggedEvenIfNothingIsWritten(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		w.files <- file("nonsense")
		synctest.Wait()
		w.messages()
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages(), "config accepted again; rules are in place")
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages())
	})
}

func TestBadFileAtStartLeavesTheRulesOfAPreviousRunAsTheyAre(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.left = &layout.Installed{Layout: xtables.Layout{Name: "IP-MASQ"}, Hash: "12345678"}
		w.held = "12345678"
		w.files <- file("nonsense")
		w.wantSource(t, FromPrevious)
		wantLines(t, w.messages(), "starting", "config rejected; config of a previous run (12345678) stays enforced")
		w.tamper(1)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if len(w.writes) > 0 {
			t.Errorf("wrote %q", w.writes)
		}
		wantLines(t, w.messages())
		// Once they are gone, it is decided again.
		w.mu.Lock()
		w.left = nil
		w.mu.Unlock()
		w.commit(nfnetlink.Change{Writer: 1})
		time.Sleep(time.Second)
		w.wantSource(t, FromDefaults)
		w.files <- file("10.0.0.0/8")
		w.wantSource(t, FromFile)
		if w.held != hashOf(t, file("10.0.0.0/8")) {
			t.Errorf("kernel has %s", w.held)
		}
	})
}

func TestBadFileAtStartOnAnEmptyNodeInstallsTheDefaults(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- Files{Err: errors.New("permission denied")}
		synctest.Wait()
		if want := hashOf(t, Files{}); w.held != want {
			t.Errorf("kernel has %q, want the defaults, %s", w.held, want)
		}
		if err := w.agent.Ready(); err == nil || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("ready returns %v", err)
		}
	})
}

func TestRejectionIsRetriedWithBackoffAndLoggedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refuse(&nfnetlink.RefusedError{Op: nfnetlink.CreateRule, Err: unix.EPERM})
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages(), "starting", "kernel rejected the rules, retrying")
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		w.mu.Lock()
		if w.looks < 28 || w.looks > 45 {
			t.Errorf("%d tries within 30 minutes", w.looks)
		}
		w.mu.Unlock()
		wantLines(t, w.messages())
		w.refuse(nil)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantLines(t, w.messages(), "kernel accepted the rules again", "applied")
	})
}

func TestNewFileIsAppliedAtOnceAfterRejections(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refuse(unix.ENOMEM)
		w.files <- file("10.0.0.0/8")
		time.Sleep(time.Hour)
		synctest.Wait()
		w.refuse(nil)
		w.files <- file("11.0.0.0/8")
		synctest.Wait()
		if want := hashOf(t, file("11.0.0.0/8")); w.held != want {
			t.Errorf("kernel has %q, want %s", w.held, want)
		}
	})
}

func TestOwnTransactionsAreIgnored(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.changes <- Heard{Change: nfnetlink.Change{Writer: ownPort}}
		synctest.Wait()
		if w.comparisons != 0 {
			t.Errorf("%d comparisons after a transaction of our own, want none", w.comparisons)
		}
	})
}

func TestDriftIsRepairedAtOnceWhileListening(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.tamper(1)
		if w.held != hashOf(t, file("10.0.0.0/8")) {
			t.Error("not repaired")
		}
		w.wantRestored(t, "vandal")
	})
}

// wantRestored fails the test unless the log has exactly one line, about that
// program.
func (w *world) wantRestored(t *testing.T, by string) {
	t.Helper()
	entries := w.logs.TakeAll()
	if len(entries) != 1 || entries[0].ContextMap()["by"] != by {
		t.Errorf("log: %v, want one line about %s", entries, by)
	}
}

func TestDriftIsRepairedWithin250msWhilePolling(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		w.messages()
		w.tamper(1)
		time.Sleep(compareEvery)
		synctest.Wait()
		w.wantRestored(t, unknown)
		w.tamper(1)
		w.wantRestored(t, "vandal")
		time.Sleep(afterRepair)
		synctest.Wait()
		if !w.joined {
			t.Error("does not listen during a fight")
		}
	})
}

func TestLargeTransactionsEndListening(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.commit(nfnetlink.Change{Generation: nfnetlink.Generation{Process: "blocklist"}, Writer: 1, Large: true})
		if w.joined {
			t.Error("still listens")
		}
		entries := w.logs.TakeAll()
		if len(entries) != 1 || entries[0].ContextMap()["by"] != "blocklist" || entries[0].ContextMap()["event"] != "listening_stopped" {
			t.Errorf("log: %v", entries)
		}
		for range 10 {
			time.Sleep(5 * time.Minute)
			w.commit(nfnetlink.Change{Writer: 1, Large: true})
		}
		// Even in a fight.
		for range fewRepairs - 1 {
			w.tamper(1)
			time.Sleep(time.Second)
			synctest.Wait()
			w.wantRestored(t, unknown)
		}
		time.Sleep(firstBreak - 51*time.Minute)
		synctest.Wait()
		if w.joined {
			t.Error("listens before its time")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !w.joined {
			t.Error("does not listen again after an hour")
		}
	})
}

func TestFailedListeningIsLoggedOnceAndReplacedByPolling(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.cannotListen = unix.EPERM
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		w.messages()
		time.Sleep(startPhase + 5*retryListening)
		synctest.Wait()
		wantLines(t, w.messages(), "cannot subscribe to ruleset changes; polling instead")
		w.tamper(1)
		time.Sleep(compareEvery)
		synctest.Wait()
		w.wantRestored(t, unknown)
		w.cannotListen = nil
		time.Sleep(retryListening)
		synctest.Wait()
		w.changes <- Heard{Err: unix.EBADF}
		w.tamper(1)
		time.Sleep(compareEvery)
		synctest.Wait()
		wantLines(t, w.messages(), "cannot subscribe to ruleset changes; polling instead", "rules were changed by another program; restored")
	})
}

func TestOwnLargeWritesHappenWithoutListening(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		var text strings.Builder
		text.WriteString("nonMasqueradeCIDRs:\n")
		for i := range manyCIDRs {
			fmt.Fprintf(&text, "- 10.%d.%d.0/24\n", i/256, i%256)
		}
		w.joins = 0
		w.files <- Files{Sources: []config.Source{{Name: "config", Data: []byte(text.String())}}}
		synctest.Wait()
		if w.listened || !w.joined || w.joins != 1 {
			t.Errorf("listened while writing: %t, listens: %t after %d joins", w.listened, w.joined, w.joins)
		}
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		if !w.listened || w.joins != 1 {
			t.Errorf("listened while writing little: %t, %d joins", w.listened, w.joins)
		}
	})
}

func TestRepairsAgainstAFightingDaemonAreDelayed(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		start := time.Now()
		for time.Since(start) < 140*time.Millisecond {
			w.tamper(1)
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		if n := len(w.messages()); n > fewRepairs+2 {
			t.Errorf("%d lines within 140 ms", n)
		}
		for time.Since(start) < time.Minute {
			w.tamper(1)
			time.Sleep(time.Millisecond)
			synctest.Wait()
		}
		if n := len(w.writes); n > 2*60 {
			t.Errorf("%d writes within a minute", n)
		}
	})
}

func TestEachOfManyFlushesIsRepaired(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		for writer := range uint32(1000) {
			w.tamper(writer + 1)
			time.Sleep(shortPause)
			synctest.Wait()
			if w.held == "tampered" {
				t.Fatalf("flush %d was not repaired", writer)
			}
		}
	})
}

func TestBusyNeighborIsPolledFourTimesASecond(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.cost = 50 * time.Microsecond
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(10 * time.Millisecond) {
			w.commit(nfnetlink.Change{Writer: 1})
		}
		if w.joined {
			t.Error("still listens")
		}
		if w.looks > idleBurst+4*60+10 {
			t.Errorf("%d checks in a minute", w.looks)
		}
		w.tamper(2)
		time.Sleep(compareEvery + time.Millisecond)
		synctest.Wait()
		if w.held == "tampered" {
			t.Error("not repaired")
		}
	})
}

func TestChecksTakeAtMostHalfAPercentOfTheTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.cost = 100 * time.Millisecond
		for start := time.Now(); time.Since(start) < 4*time.Minute; time.Sleep(10 * time.Millisecond) {
			w.commit(nfnetlink.Change{Writer: 1})
		}
		if w.looks > 240/20+5 { // resyncs are extra
			t.Errorf("%d checks of 100 ms in four minutes", w.looks)
		}
		if w.looks < 240/20-4 {
			t.Errorf("%d checks of 100 ms in four minutes", w.looks)
		}
		w.commit(nfnetlink.Change{Writer: 1})
		time.Sleep(w.cost)
		if !time.Now().Before(w.agent.drift.pace.checkAt) {
			t.Fatal("no check is delayed")
		}
		w.tamper(2)
		time.Sleep(compareEvery + w.cost) // a resync may be at it
		synctest.Wait()
		if w.held == "tampered" {
			t.Error("not repaired by a quick check")
		}
	})
}

func TestBusyNeighborDoesNotDelayTheResync(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		for range 10 {
			time.Sleep(30 * time.Second)
			w.commit(nfnetlink.Change{Writer: 1})
		}
		if w.rereads < 4 {
			t.Errorf("%d resyncs in 5 minutes", w.rereads)
		}
	})
}

func TestBusyNeighborDoesNotCauseRetries(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refuse(unix.EOPNOTSUPP)
		w.cost = 20 * time.Millisecond
		w.files <- file("10.0.0.0/8")
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(10 * time.Millisecond) {
			w.commit(nfnetlink.Change{Writer: 1})
		}
		synctest.Wait()
		if w.looks > 70 {
			t.Errorf("%d tries in a minute", w.looks)
		}
		if w.rereads < 4 { // after 1, 3, 7, 15 s
			t.Errorf("the file was read %d times", w.rereads)
		}
	})
}

func TestHangupChecksFileAndKernel(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		w.hangup <- unix.SIGHUP
		synctest.Wait()
		if w.looks != 2 || w.rereads != 1 {
			t.Errorf("%d looks, %d rereads; want 2 and 1", w.looks, w.rereads)
		}
	})
}

// legacy is the leftovers of an older agent.
func legacy() kernel.Others {
	return kernel.Others{Legacy: []foreign.LegacyChain{{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ", Rules: 2}}}
}

func TestRulesOfOlderAgentsAreLoggedWhenTheyAppearAndVanish(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.others = legacy()
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages(), "starting", "applied",
			"rules of an iptables-based agent are also active: stop it, and run with --takeover or cleanup --legacy-only")
		for range 3 {
			w.commit(nfnetlink.Change{Writer: 1})
			time.Sleep(time.Minute)
		}
		synctest.Wait()
		wantLines(t, w.messages())
		w.others = kernel.Others{}
		w.commit(nfnetlink.Change{Writer: 1})
		time.Sleep(time.Minute)
		synctest.Wait()
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
				w.others.Conflicts = append(w.others.Conflicts, foreign.Conflict{Place: foreign.Place{Rule: r, Base: "POSTROUTING"}})
			}
		}
		lookAgain := func() {
			w.commit(nfnetlink.Change{Writer: 1})
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		const one = "another program's rule masquerades what the config exempts"
		conflicts("nat", maxLogged+2)
		conflicts("other", 1)
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		wantLines(t, w.messages(), append(append([]string{"starting", "applied"}, slices.Repeat([]string{one}, maxLogged+1)...),
			"more rules of other programs contradict the config; see nft-masq-agent status")...)
		// The same rules again, with different handles, and one more.
		w.others = kernel.Others{}
		conflicts("other", 1)
		conflicts("nat", maxLogged+3)
		lookAgain()
		wantLines(t, w.messages(), one)
		// The same rule for another reason.
		w.others.Conflicts[0].Source = "192.0.2.0/24"
		lookAgain()
		wantLines(t, w.messages(), one)
	})
}

func TestConfigChangeChecksForConflictsAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		time.Sleep(time.Minute)
		synctest.Wait()
		w.messages()
		w.others = kernel.Others{Conflicts: []foreign.Conflict{{Place: foreign.Place{Rule: nfnetlink.Rule{Table: "nat"}}}}}
		w.files <- file("100.64.0.0/10")
		synctest.Wait()
		wantLines(t, w.messages(), "applied", "another program's rule masquerades what the config exempts")
	})
}

func TestReturningRulesOfOlderAgentsAreRemovedEachTime(t *testing.T) {
	bubble(t, true, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		if w.last != layout.TakeOver {
			t.Error("the first sync does not take over")
		}
		w.messages()
		for _, by := range []string{unknown, "iptables", "iptables"} {
			w.find(legacy())
			w.commit(nfnetlink.Change{Generation: nfnetlink.Generation{Process: "iptables"}, Writer: 1})
			time.Sleep(time.Second)
			synctest.Wait()
			entries := w.logs.TakeAll()
			if len(entries) != 1 || entries[0].ContextMap()["event"] != "legacy_rules_removed" || entries[0].ContextMap()["by"] != by {
				t.Errorf("log: %v", entries)
			}
		}
		// Also after a bad edit, because the last good config has replaced them.
		w.files <- file("nonsense")
		synctest.Wait()
		w.messages()
		w.find(legacy())
		w.hangup <- unix.SIGHUP
		synctest.Wait()
		if len(w.seen().Legacy) > 0 {
			t.Error("not removed while a good config is enforced")
		}
	})
}

func TestTakeoverChecksAreLimitedNextToABusyNeighbor(t *testing.T) {
	bubble(t, true, func(t *testing.T, w *world) {
		w.cost = 10 * time.Millisecond
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		looks := 0
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(50 * time.Millisecond) {
			w.last = layout.Ours
			w.commit(nfnetlink.Change{Writer: 1})
			synctest.Wait()
			if w.last == layout.TakeOver {
				looks++
			}
		}
		if looks > 32 {
			t.Errorf("%d checks for rules of older agents in a minute", looks)
		}
	})
}

func TestTakeoverIsKeptPendingWhileTheKernelRejects(t *testing.T) {
	bubble(t, true, func(t *testing.T, w *world) {
		w.refuse(unix.EPERM)
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		w.refuse(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if w.last != layout.TakeOver || w.held == "" {
			t.Errorf("depth %d, kernel has %q", w.last, w.held)
		}
	})
}

func TestStoppedLoopIsNotAlive(t *testing.T) {
	var a *Agent
	inBubble(t, func(_ *testing.T, w *world) { a = w.agent })
	if err := a.Alive(); !errors.Is(err, ErrStuck) {
		t.Errorf("Alive() = %v", err)
	}
}

func TestLongStepIsNotAlive(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.cost = 2 * stuckAfter
		w.files <- file("10.0.0.0/8")
		time.Sleep(stuckAfter + time.Second)
		if err := w.agent.Alive(); !errors.Is(err, ErrStuck) {
			t.Errorf("Alive() = %v", err)
		}
		time.Sleep(2 * stuckAfter)
		synctest.Wait()
		if err := w.agent.Alive(); err != nil {
			t.Errorf("Alive() = %v after the step", err)
		}
	})
}
