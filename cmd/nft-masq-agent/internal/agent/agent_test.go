package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	captured "go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest/logged"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/xtables"
)

// found are the chains of older agents on the node.
type found struct{ Legacy []older.Chain }

// A world is the loop in a synctest bubble, with channels instead of files, and is
// its kernel.
type world struct {
	files   chan Files
	hangup  chan os.Signal
	rereads int

	held      string // hash of the rules in the kernel
	left      *layout.Installed
	mu        sync.Mutex // because a firing timer does not synchronize
	refuses   error
	writes    []string // hashes, in the order of the writes
	looks     int
	last      layout.Depth
	deep      int // checks of more than our rules
	frames    int // checks without the elements of sets
	cost      time.Duration
	frameCost time.Duration
	stall     time.Duration // of each check, without processor time
	used      time.Duration // processor time
	ends      bool          // the agent, during the next check
	end       func()
	exchanged bool // an element of a set was
	others    found
	addresses []netip.Addr
	unlisted  error
	moves     chan node.Change
	follows   int

	counts    []nft.Counts
	countsErr error

	generation uint32
	holder     int // of the lock, 0 for none

	agent *Agent
	logs  *captured.ObservedLogs
}

func testSettings() Settings {
	return Settings{
		ConfigPath: "/etc/config/ip-masq-agent", NFT: nft.Options{Layout: native.Layout{}, RandomFully: true},
		Version: "test", Args: []string{"--v=4"}, LostLines: func() uint64 { return 0 },
	}
}

// inBubble runs the loop; test runs while the loop waits for events.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) { bubble(t, false, test) }

func bubble(t *testing.T, takeOver bool, test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{generation: 1, files: make(chan Files), moves: make(chan node.Change, 1), hangup: make(chan os.Signal)}
		core, logs := captured.New(zap.InfoLevel)
		w.logs = logs
		settings := testSettings()
		settings.TakeOver = takeOver
		w.agent = New(
			Inputs{
				Files: w.files, Hangup: w.hangup, Reread: func() { w.locked(func() { w.rereads++ }) },
				Generation: w.currentGeneration, Processor: w.processor,
				Addresses: w.listed,
				Follow: func(context.Context) <-chan node.Change {
					w.follows++
					return w.moves
				},
				Lock: w.lock, Later: w.lock, Holder: func() (int, bool) { return w.holder, w.holder != 0 },
			},
			w,
			settings,
			zap.New(logged.DocumentedCore{Core: core, T: t}),
		)
		ctx, cancel := context.WithCancel(t.Context())
		w.end = cancel
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

func (w *world) OlderDecides(context.Context) (bool, error) {
	o := w.seen()
	return slices.ContainsFunc(o.Legacy, older.Chain.Decides), w.refusal()
}

func (w *world) Apply(_ context.Context, r nft.Ruleset, depth layout.Depth) (kernel.Applied, error) {
	w.mu.Lock()
	w.last = depth
	if depth > layout.Frame {
		w.looks++
	}
	if depth > layout.Ours {
		w.deep++
	}
	cost := w.cost
	if depth == layout.Frame {
		w.frames++
		cost = w.frameCost
	}
	w.used += cost
	cost += w.stall
	if w.ends {
		w.end()
	}
	w.mu.Unlock()
	time.Sleep(cost)
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
	if w.held != holds || w.exchanged && depth > layout.Frame {
		w.held, w.exchanged = holds, false
		w.writes = append(w.writes, w.held)
		w.generation++
		a.Differences = append(a.Differences, "differs")
	}
	a.Generation = w.generation
	return a, nil
}

func (w *world) Close() error { return nil }

func (w *world) lock() (io.Closer, error) {
	if w.holder != 0 {
		return nil, unix.EADDRINUSE
	}
	return w, nil
}

func (w *world) seen() found {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.others
}

// locked calls a function that uses fields: a firing timer does not synchronize.
func (w *world) locked(use func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	use()
}

// find sets the rules of older agents on the node.
func (w *world) find(o found) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.others = o
}

func (w *world) processor() (used time.Duration) {
	w.locked(func() { used = w.used })
	return used
}

func (w *world) currentGeneration() (uint32, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.generation, nil
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
	return nft.Compile(c, testSettings().NFT).Hash()
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
func (w *world) gets(f Files) {
	w.files <- f
	synctest.Wait()
}

// noticed is a transaction that the agent has noticed.
func (w *world) noticed() {
	w.commit()
	pass(restoredWithin)
}

// tamper changes our rules.
func (w *world) tamper() {
	w.mu.Lock() // a resync may be running
	w.held = "tampered"
	w.mu.Unlock()
	w.commit()
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

func TestStartAppliesTheFileAndLogsItOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		wantLines(t, w.messages(), "starting", "applied")
		w.gets(file("11.0.0.0/8"))
		wantLines(t, w.messages(), "applied")
		if err := w.agent.Ready(); err != nil {
			t.Errorf("not ready: %v", err)
		}
	})
}

func TestQuietResyncLogsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		w.messages()
		pass(10*time.Minute + time.Second)
		// Everything but elements is also read every ten seconds.
		if w.looks != 1+10 || w.frames < 45 || w.frames > 65 || w.rereads != 10 || len(w.writes) != 1 {
			t.Errorf("%d looks, %d without elements, %d rereads, %d writes; want 11, 45 to 65, 10, 1", w.looks, w.frames,
				w.rereads, len(w.writes))
		}
		wantLines(t, w.messages())
	})
}

func TestBadEditKeepsLastGoodRules(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		good := file("10.0.0.0/8")
		w.gets(good)
		w.messages()
		w.gets(file("10.0.0.1/8"))
		wantLines(t, w.messages(), "config rejected; last good config ("+hashOf(t, good)+") stays enforced")
		if err := w.agent.Ready(); err == nil || !strings.Contains(err.Error(), "config:1:") {
			t.Errorf("ready returns %v, which does not name the position", err)
		}
		w.tamper()
		pass(restoredWithin)
		if w.held != hashOf(t, good) {
			t.Error("the last good rules are no longer enforced")
		}
	})
}

func TestFixedConfigIsLoggedEvenIfNothingIsWritten(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		w.gets(file("nonsense"))
		w.messages()
		w.gets(file("10.0.0.0/8"))
		wantLines(t, w.messages(), "config accepted again; rules are in place")
		w.gets(file("10.0.0.0/8"))
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
		w.tamper()
		pass(10 * time.Minute)
		if len(w.writes) > 0 {
			t.Errorf("wrote %q", w.writes)
		}
		wantLines(t, w.messages())
		// Once they are gone, it is decided again.
		w.mu.Lock()
		w.left = nil
		w.mu.Unlock()
		w.commit()
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
		w.gets(Files{Err: errors.New("permission denied")})
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
		w.gets(file("10.0.0.0/8"))
		wantLines(t, w.messages(), "starting", "kernel rejected the rules, retrying")
		pass(30 * time.Minute)
		w.mu.Lock()
		if w.looks < 180 || w.looks > 220 { // the last one is at most ten seconds ago
			t.Errorf("%d tries within 30 minutes", w.looks)
		}
		w.mu.Unlock()
		wantLines(t, w.messages())
		w.refuse(nil)
		pass(2 * time.Minute)
		wantLines(t, w.messages(), "kernel accepted the rules again", "applied")
	})
}

func TestNewFileIsAppliedAtOnceAfterRejections(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refuse(unix.ENOMEM)
		w.files <- file("10.0.0.0/8")
		pass(time.Hour)
		w.gets(file("12.0.0.0/8")) // refused, too, and retried as soon as the first one
		w.refuse(nil)
		pass(1200 * time.Millisecond)
		if want := hashOf(t, file("12.0.0.0/8")); w.held != want {
			t.Errorf("kernel has %q, want %s", w.held, want)
		}
		w.gets(file("11.0.0.0/8"))
		if want := hashOf(t, file("11.0.0.0/8")); w.held != want {
			t.Errorf("kernel has %q, want %s", w.held, want)
		}
	})
}

func TestDriftIsRepairedWithin250ms(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		for range 29 {
			w.tamper()
			pass(restoredWithin)
			wantLines(t, w.messages(), "rules were changed by another program; restored")
		}
		if want := hashOf(t, file("10.0.0.0/8")); w.held != want {
			t.Errorf("the kernel has %s", w.held)
		}
	})
}

// A table that is owned by a process goes with it, without a new generation. Until then the
// kernel may refuse to write it.
func TestTableThatVanishesWithoutANewGenerationIsRestoredWithinTenSeconds(t *testing.T) {
	for _, refused := range []error{
		nil, unix.ENOMEM, &nfnetlink.RefusedError{Op: nfnetlink.CreateRule, Err: unix.EPERM},
	} {
		for _, rejected := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v, rejected file: %t", refused, rejected), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.settled(t)
					if rejected {
						w.files <- file("nonsense")
					}
					w.refuse(refused)
					w.tamper()
					pass(10*time.Minute + 5*time.Second) // tries are a minute apart
					w.locked(func() { w.held = "" })
					w.refuse(nil)
					pass(10 * time.Second)
					if want := hashOf(t, file("10.0.0.0/8")); w.held != want {
						t.Errorf("the kernel has %q, want %s", w.held, want)
					}
				})
			})
		}
	}
}

func TestRepairsAgainstAFightingProgramAreOneSecondApart(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		fight := func(d time.Duration) (writes int) {
			before := len(w.writes)
			for start := time.Now(); time.Since(start) < d; time.Sleep(10 * time.Millisecond) {
				w.tamper()
				synctest.Wait()
			}
			synctest.Wait()
			return len(w.writes) - before
		}
		if n := fight(5 * time.Second); n < 19 || n > 20 {
			t.Errorf("%d repairs in five seconds, want four a second", n)
		}
		w.messages()
		fight(10 * time.Second)
		if n := w.logs.FilterMessageSnippet("at most once a second").Len(); n != 1 {
			t.Errorf("said %d times", n)
		}
		if n := fight(time.Minute); n < 45 || n > 65 {
			t.Errorf("%d repairs within a minute", n)
		}
	})
}

func TestBusyNeighborIsPolledFourTimesASecond(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.cost = 50 * time.Microsecond
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(10 * time.Millisecond) {
			w.commit()
		}
		synctest.Wait()
		if w.looks < 4*60-5 || w.looks > 4*60+5 {
			t.Errorf("%d checks in a minute", w.looks)
		}
		w.tamper()
		pass(restoredWithin + time.Millisecond)
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
			w.commit()
		}
		// Every 20 s after the first two, and resyncs are extra.
		w.locked(func() {
			if w.looks < 240/20-4 || w.looks > 2+240/20+5 {
				t.Errorf("%d checks of 100 ms in four minutes", w.looks)
			}
		})
		time.Sleep(time.Minute)
		w.tamper() // after a quiet time
		pass(restoredWithin + w.cost)
		if w.held == "tampered" {
			t.Error("not repaired at once")
		}
	})
}

// Reading large sets takes long, so that their elements are read less often next to a busy
// program. Everything else is not.
func TestLargeSetsDoNotDelayOtherRepairs(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		busy := func(d time.Duration) {
			for start := time.Now(); time.Since(start) < d; time.Sleep(10 * time.Millisecond) {
				w.commit()
			}
			synctest.Wait()
		}
		w.cost, w.frameCost = 10*time.Millisecond, time.Millisecond
		for range 20 {
			busy(time.Second)
			w.tamper()
			busy(restoredWithin + 10*time.Millisecond)
			wantLines(t, w.messages(), "rules were changed by another program; restored")
		}
		busy(10 * time.Second)
		w.locked(func() { w.exchanged = true })
		busy(cpuShare*w.cost + restoredWithin + w.cost)
		wantLines(t, w.messages(), "rules were changed by another program; restored")
		w.frames, w.frameCost = 0, 10*time.Millisecond
		busy(time.Minute)
		if most := int((time.Minute+inARow)/(cpuShare*w.frameCost)) + 1; w.frames < 20 || w.frames > most {
			t.Errorf("%d checks without elements in a minute, of 10 ms each, want at most %d", w.frames, most)
		}
		w.locked(func() { w.looks, w.frames = 0, 0 })
		time.Sleep(5 * time.Second) // the last commit was followed by a check without elements
		w.locked(func() {
			if w.looks != 1 || w.frames > 1 {
				t.Errorf("%d and %d checks after the last commit", w.looks, w.frames)
			}
		})
	})
}

func TestBusyNeighborDoesNotDelayTheResync(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		for range 10 {
			time.Sleep(30 * time.Second)
			w.commit()
		}
		synctest.Wait()
		w.locked(func() {
			if w.rereads < 4 {
				t.Errorf("%d resyncs in 5 minutes", w.rereads)
			}
		})
	})
}

func TestBusyNeighborDoesNotCauseRetries(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.refuse(unix.EOPNOTSUPP)
		w.cost = 20 * time.Millisecond
		w.files <- file("10.0.0.0/8")
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(10 * time.Millisecond) {
			w.commit()
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
		w.gets(file("10.0.0.0/8"))
		w.hangup <- unix.SIGHUP
		synctest.Wait()
		if w.looks != 2 || w.rereads != 1 {
			t.Errorf("%d looks, %d rereads; want 2 and 1", w.looks, w.rereads)
		}
	})
}

// legacy is the leftovers of an older agent.
func legacy() found {
	id := nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}
	return found{Legacy: []older.Chain{{ChainID: id, Rules: 2}}}
}

func TestReturningRulesOfOlderAgentsAreRemovedEachTime(t *testing.T) {
	bubble(t, true, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		if w.last != layout.TakeOver {
			t.Error("the first sync does not take over")
		}
		w.messages()
		for range 3 {
			w.find(legacy())
			w.commit()
			pass(time.Second)
			wantLines(t, w.messages(), "rules of an iptables-based agent came back and were removed: stop that agent")
		}
		// Also after a bad edit, because the last good config has replaced them.
		w.gets(file("nonsense"))
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
		w.gets(file("10.0.0.0/8"))
		looks := 0
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(50 * time.Millisecond) {
			synctest.Wait()
			w.locked(func() { w.last = layout.Ours })
			w.commit()
			synctest.Wait()
			w.locked(func() {
				if w.last == layout.TakeOver {
					looks++
				}
			})
		}
		if most := int((time.Minute+inARow)/(cpuShare*w.cost)) + 2; looks > most {
			t.Errorf("%d checks for rules of older agents in a minute, want at most %d", looks, most)
		}
	})
}

func TestTakeoverIsKeptPendingWhileTheKernelRejects(t *testing.T) {
	bubble(t, true, func(t *testing.T, w *world) {
		w.refuse(unix.EPERM)
		w.gets(file("10.0.0.0/8"))
		w.refuse(nil)
		pass(2 * time.Second)
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
