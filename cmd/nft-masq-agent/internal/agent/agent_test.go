package agent

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/loop"
)

var update = flag.Bool("update", false, "regenerate testdata/loop.txt")

// A world is one with an agent.
type world struct {
	*loop.World
	agent *Agent
}

func testSettings() Settings {
	return Settings{
		ConfigPath: "/etc/config/ip-masq-agent", NFT: nft.Options{Layout: native.Layout{}, RandomFully: true},
		Version: "test", Args: []string{"--v=4"}, LostLines: func() uint64 { return 0 },
	}
}

// A place is that of the second agent.
type place struct{ *loop.World }

func (p place) take() (io.Closer, error) { p.Late = os.Getpid(); return p, nil }
func (p place) Close() error             { p.Late = 0; return nil }

// inBubble runs the loop; test runs while the loop waits for events.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	named(t, "", test)
}

// named runs a loop whose settings are in the name of a script.
func named(t *testing.T, name string, test func(t *testing.T, w *world)) {
	t.Helper()
	w := &world{}
	loop.Run(t, func(n *loop.World, log *zap.Logger) loop.Agent {
		w.World = n
		settings := testSettings()
		settings.TakeOver = strings.Contains(name, "(takeover)")
		if strings.Contains(name, "(second agent)") {
			n.Other = 7
		}
		files := make(chan Files)
		n.Options, n.Deliver = settings.NFT, func(s []config.Source, err error) { files <- Files{s, err} }
		w.agent = New(Inputs{
			Files: files, Hangup: n.Hangup, Reread: n.Reread, Generation: n.Generation, Processor: n.Processor,
			Addresses: n.Addresses, Follow: n.Follow, Lock: n.Lock, Announce: place{n}.take, Holder: n.Holder,
			Announced: n.Latecomer,
		}, n, settings, log)
		return w.agent
	}, func(*loop.World) {
		synctest.Wait()
		if w.Other != 0 && w.Late == 0 {
			w.Error("the place of the second agent is free")
		}
		test(w.T, w)
	})
}

func TestLoopDoesWhatItsScriptsSay(t *testing.T) {
	loop.Play(t, "testdata/loop.txt", *update, func(t *testing.T, name string, play func(*loop.World, loop.Steps)) {
		named(t, name, func(_ *testing.T, w *world) { play(w.World, nil) })
	})
}

func TestRepairsAgainstAFightingProgramAreOneSecondApart(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		fight := func(d time.Duration) (writes int) {
			before := len(w.Writes)
			time.Sleep(5 * time.Millisecond) // never at the moment of a check, of which the second would find it
			for start := time.Now(); time.Since(start) < d; time.Sleep(10 * time.Millisecond) {
				w.Tamper()
				synctest.Wait()
			}
			synctest.Wait()
			return len(w.Writes) - before
		}
		if n := fight(5 * time.Second); n < 19 || n > 20 {
			t.Errorf("%d repairs in five seconds, want four a second", n)
		}
		w.Messages()
		fight(10 * time.Second)
		if n := w.Logs.FilterMessageSnippet("at most once a second").Len(); n != 1 {
			t.Errorf("said %d times", n)
		}
		if n := fight(time.Minute); n < 45 || n > 65 {
			t.Errorf("%d repairs within a minute of fight, want about one a second", n)
		}
	})
}

func TestBusyNeighborIsPolledFourTimesASecond(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		w.Cost = 50 * time.Microsecond
		w.Next(time.Minute, 10*time.Millisecond)
		if w.Looks < 4*60-5 || w.Looks > 4*60+5 {
			t.Errorf("%d checks in a minute next to a busy program, want four a second", w.Looks)
		}
		w.Tamper()
		w.Pass(restoredWithin + time.Millisecond)
		if w.Held == "tampered" {
			t.Errorf("rules that were tampered with are still there after %s", restoredWithin)
		}
	})
}

func TestChecksTakeAtMostTheirShareOfTheTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		w.Cost = 100 * time.Millisecond
		w.Next(4*time.Minute, 10*time.Millisecond)
		// Every 100 s after the first, and resyncs are extra.
		w.Locked(func() {
			if w.Looks < 240/100 || w.Looks > 1+240/100+3 {
				t.Errorf("%d checks of 100 ms in four minutes", w.Looks)
			}
		})
		w.Pass(time.Minute)
		w.Tamper() // after a quiet time
		w.Pass(restoredWithin + w.Cost)
		if w.Held == "tampered" {
			t.Error("after a quiet time, rules that were tampered with are not repaired at the first event")
		}
	})
}

// Reading large sets takes long, so that their elements are read less often next to a busy
// program. Everything else is not.
func TestLargeSetsDoNotDelayOtherRepairs(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		busy := func(d time.Duration) { w.Next(d, 10*time.Millisecond) }
		w.Cost, w.FrameCost = 10*time.Millisecond, time.Millisecond
		for range 20 {
			busy(time.Second)
			w.Tamper()
			busy(restoredWithin + 10*time.Millisecond)
			w.WantLines("rules were changed by another program; restored")
		}
		busy(10 * time.Second)
		w.Locked(func() { w.Exchanged = true })
		busy(ofElements*w.Cost + restoredWithin + w.Cost)
		w.WantLines("rules were changed by another program; restored")
		w.Frames, w.FrameCost = 0, 10*time.Millisecond
		busy(time.Minute)
		if most := int((time.Minute+inARow)/(ofRules*w.FrameCost)) + 1; w.Frames < 20 || w.Frames > most {
			t.Errorf("%d checks without elements in a minute, of 10 ms each, want at most %d", w.Frames, most)
		}
		w.Locked(func() { w.Looks, w.Frames = 0, 0 })
		w.Pass(5 * time.Second) // the last commit was followed by a check without elements
		w.Locked(func() {
			if w.Looks != 1 || w.Frames > 1 {
				t.Errorf("%d and %d checks after the last commit", w.Looks, w.Frames)
			}
		})
	})
}

// Reading 100,000 CIDRs once takes more than 1 % of a minute.
func TestElementsOfManyCIDRsAreReadWhenOthersPauseOrTenMinutesLater(t *testing.T) {
	const cost = 750 * time.Millisecond
	start := func(w *world, cidrs int) {
		w.Cost = cost
		var list []string
		for n := range cidrs {
			list = append(list, fmt.Sprintf("11.%d.%d.%d/32", n>>16, n>>8&0xff, n&0xff))
		}
		w.Gets(strings.Join(list, ", "))
		w.Pass(cost)
		w.Messages()
		w.Locked(func() { w.Looks = 0 })
	}
	const restored = "rules were changed by another program; restored"
	for _, every := range []time.Duration{10 * time.Millisecond, time.Second, 9 * time.Second} {
		inBubble(t, func(t *testing.T, w *world) {
			start(w, 12_000)
			w.Next(5*time.Second, every)
			w.Locked(func() { w.Exchanged = true })
			w.Next(9*time.Minute, every)
			w.Locked(func() {
				if w.Looks > 0 {
					t.Errorf("a commit every %s: elements were read %d times", every, w.Looks)
				}
			})
			w.Next(time.Minute, every)
			w.WantLines(restored)
		})
	}
	inBubble(t, func(t *testing.T, w *world) {
		start(w, 12_000)
		w.Pass(5 * time.Second)
		w.Locked(func() { w.Exchanged = true })
		w.Commit()
		w.Pass(12 * time.Second)
		w.WantLines(restored)
	})
	inBubble(t, func(t *testing.T, w *world) {
		start(w, 10_000) // and the link-local range
		w.Cost = 30 * time.Millisecond
		w.Locked(func() { w.Exchanged = true })
		w.Next(30*time.Second, 10*time.Millisecond)
		w.WantLines(restored)
	})
}

func TestBusyNeighborDoesNotDelayTheResync(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		w.Next(5*time.Minute+time.Second, 30*time.Second)
		if w.Rereads < 4 {
			t.Errorf("%d resyncs in 5 minutes", w.Rereads)
		}
	})
}

func TestRejectionIsRetriedWithBackoffWhateverOthersDo(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Reject(unix.EOPNOTSUPP)
		w.Cost = 20 * time.Millisecond
		w.Gets("10.0.0.0/8")
		w.Next(time.Minute, 10*time.Millisecond)
		if w.Looks > 70 {
			t.Errorf("%d tries in a minute, want at most 70 while the kernel rejects all", w.Looks)
		}
		if w.Rereads < 4 { // after 1, 3, 7, 15 s
			t.Errorf("the file was read %d times", w.Rereads)
		}
		w.Locked(func() { w.Looks = 0 })
		w.Pass(30 * time.Minute)
		if w.Looks < 180 || w.Looks > 220 { // the last one is at most ten seconds ago
			t.Errorf("%d tries within 30 minutes", w.Looks)
		}
	})
}

func TestTakeoverChecksAreLimitedNextToABusyNeighbor(t *testing.T) {
	named(t, "(takeover)", func(t *testing.T, w *world) {
		w.Cost = 10 * time.Millisecond
		w.Gets("10.0.0.0/8")
		looks := 0
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(50 * time.Millisecond) {
			synctest.Wait()
			w.Locked(func() { w.Last = nft.Contents })
			w.Commit()
			synctest.Wait()
			w.Locked(func() {
				if w.Last == nft.TakeOver {
					looks++
				}
			})
		}
		if most := int((time.Minute+inARow)/(ofElements*w.Cost)) + 2; looks > most {
			t.Errorf("%d checks for rules of older agents in a minute, want at most %d", looks, most)
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

func TestObserversSeeRepairsAndTheirPassEndsBeforeAnotherPolicyIsWritten(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		pass, end := w.agent.WithPolicy(t.Context(), w.agent.Current())
		defer end()
		w.Commit()
		w.Pass(restoredWithin)
		if n, _ := w.Generation(); w.agent.published.Load().generation != n {
			t.Errorf("generation %d is not known to be right", n)
		}
		w.Gets("10.0.0.0/8")
		w.Locked(func() { w.Cost = time.Second })
		for range 2 { // the second one is not followed by a check of elements
			w.Tamper()
			w.Pass(2 * time.Second)
		}
		if n := w.agent.published.Load().repairs; n != 2 || pass.Err() != nil {
			t.Errorf("%d repairs, %v, want that the pass goes on after two", n, pass.Err())
		}
		w.Reject(unix.EPERM)
		w.Tamper()
		w.Pass(restoredWithin)
		if w.agent.published.Load().inForce() {
			t.Error("rules that cannot be restored are in force")
		}
		w.Reject(nil)
		w.Gets("11.0.0.0/8")
		if v := w.agent.Current(); !v.Pending || v.InForce || pass.Err() == nil {
			t.Errorf("pending %t, in force %t, %v while it is written", v.Pending, v.InForce, pass.Err())
		}
	})
}
