package watch

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/script"
)

var update = flag.Bool("update", false, "regenerate testdata/settle.txt")

// A fakePath is what a checker sees: a file at /file, and possibly others in a
// directory with it. It has no clock but that of a synctest bubble.
type fakePath struct {
	*follower
	out    chan string
	start  time.Time
	events chan fsnotify.Event

	mu      sync.Mutex
	content string
	files   files
	cost    time.Duration // of reading; following the path costs a tenth
	spent   time.Duration
	taken   int // events
	checks  int
	reads   int
	hangs   chan struct{} // checks return when it is closed
}

func newFakePath() *fakePath {
	p := &fakePath{start: time.Now(), out: make(chan string, 1), events: make(chan fsnotify.Event, 100), content: "one"}
	p.follower = newFollower(&checker{events: p.events, requests: make(chan struct{}, 1)})
	p.follower.check = p.check
	p.follower.processor = func() time.Duration {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.spent
	}
	p.files = files{"/file": fileOf(1, "/file", time.Hour)}
	return p
}

// fileOf returns a file that was written some time ago.
func fileOf(number uint64, path string, age time.Duration) file {
	at := time.Now().Add(-age)
	return file{path, unix.Statx_t{Ino: number, Mtime: unix.StatxTimestamp{Sec: at.Unix(), Nsec: uint32(at.Nanosecond())}}}
}

func (p *fakePath) check(read bool, known files) (r reading, deliver func()) {
	p.mu.Lock()
	r.files = maps.Clone(p.files)
	cost, hangs, content := p.cost/10, p.hangs, p.content
	if read || !maps.Equal(r.files, known) {
		cost = p.cost
		deliver, r.id = func() { replace(p.out, content) }, "content "+content
		r.present = present(content, p.files)
		p.reads++
	}
	p.spent += cost
	p.checks++
	p.mu.Unlock()
	if hangs != nil {
		<-hangs
	}
	time.Sleep(cost)
	return r, deliver
}

// present returns how many files have something in them: none with an empty content, or one that is gone. It is not
// known with one that cannot be read.
func present(content string, all files) (n int) {
	switch content {
	case "", "gone":
		return 0
	case "unreadable":
		return unknown
	}
	for _, f := range all {
		if f.stat.Ino != 0 {
			n++
		}
	}
	return n
}

// do applies an operation to the file, and reports it as inotify would.
func (p *fakePath) do(word, content string) {
	p.mu.Lock()
	at, event := "", fsnotify.Write // of another file
	switch word {
	case "other": // in the directory, whose content does not matter
		at = "/log"
		p.files[at] = fileOf(9, at, 0)
	case "lose": // that file vanishes, and with it its content
		at, event = "/log", fsnotify.Remove
		p.content = content
		delete(p.files, at)
	case "hang": // until "answer"
		p.hangs = make(chan struct{})
	case "answer":
		close(p.hangs)
		p.hangs = nil
	case "cost": // how many milliseconds a check takes
		n, _ := strconv.Atoi(content)
		p.cost = time.Duration(n) * time.Millisecond
	default:
		p.mu.Unlock()
		p.change(word, content)
		return
	}
	p.mu.Unlock()
	if at != "" {
		p.report(at, event)
	}
}

// change applies an operation that gives the file another content.
func (p *fakePath) change(word, content string) {
	p.mu.Lock()
	was := p.files["/file"]
	p.content = content
	now := fileOf(was.stat.Ino, was.path, 0)
	var op fsnotify.Op
	switch word {
	case "write": // in place
		op = fsnotify.Write
	case "tick": // in place, within the same tick of the clock as before
		now, op = was, fsnotify.Write
	case "silently": // in place, but without an event
	case "put": // an older complete file, but without an event
		now = fileOf(was.stat.Ino+1, was.path, time.Hour)
	case "create", "rename":
		now.stat.Ino++
		op = fsnotify.Create
	case "swap", "shrink": // a link on the way, and with it the other file is gone
		if word == "shrink" {
			delete(p.files, "/log")
		}
		now.stat.Ino++
		now.path = fmt.Sprintf("/%d/file", now.stat.Ino)
	case "plain": // a file in place of a link
		now.stat.Ino++
		now.path = "/file"
		op = fsnotify.Create
	case "unmount": // neither a file nor its directory
		now = file{}
	case "remove":
		now.stat = unix.Statx_t{}
		op = fsnotify.Remove
	case "poll":
		now = was
	}
	p.files["/file"] = now
	p.mu.Unlock()
	switch {
	case word == "poll":
		p.checker.reread()
	case op != 0:
		p.report(now.path, op)
	case word == "swap", word == "shrink":
		p.report("/..data", fsnotify.Create)
	}
}

// report drops an event if there are too many, like the kernel.
func (p *fakePath) report(name string, op fsnotify.Op) {
	select {
	case p.events <- fsnotify.Event{Name: name, Op: op}:
		p.taken++
	default:
	}
}

// play does each step ("MILLISECONDS WORD CONTENT") at its time and returns
// what was delivered until four seconds after the last ("MILLISECONDS CONTENT").
// The watcher starts at 0, after the steps of that time.
func (p *fakePath) play(t *testing.T, steps []string) []string {
	t.Helper()
	var got []string
	for len(steps) > 0 && strings.HasPrefix(steps[0], "0 ") {
		p.step(t, steps[0])
		steps = steps[1:]
	}
	p.following(t, func(content string) {
		got = append(got, fmt.Sprintf("%d %s", time.Since(p.start).Milliseconds(), content))
	}, func() {
		for _, step := range steps {
			synctest.Wait()
			p.step(t, step)
		}
		time.Sleep(4 * time.Second)
	})
	return got
}

// following calls do while the path is followed, and got with what is delivered.
func (p *fakePath) following(t *testing.T, got func(string), do func()) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { p.run(ctx) })
	all.Go(func() {
		for {
			select {
			case content := <-p.out:
				got(content)
			case <-ctx.Done():
				return
			}
		}
	})
	do()
	stop()
	all.Wait()
}

func (p *fakePath) step(t *testing.T, step string) {
	t.Helper()
	at, rest, _ := strings.Cut(step, " ")
	word, content, _ := strings.Cut(rest, " ")
	ms, err := strconv.Atoi(at)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Until(p.start.Add(time.Duration(ms) * time.Millisecond)))
	p.do(word, content)
}

func every(interval, from, to int, format string) (steps []string) {
	for at := from; at < to; at += interval {
		steps = append(steps, fmt.Sprintf("%d "+strings.ReplaceAll(format, "%d", "%[1]d"), at))
	}
	return steps
}

// The steps of testdata/settle.txt are "MILLISECONDS WORD CONTENT", or "FROM-TO/INTERVAL WORD CONTENT" for one at
// each of these times, which %d is. What is delivered has its time.
func TestContentIsDeliveredWhenSettled(t *testing.T) {
	script.Golden(t, "testdata/settle.txt", *update, func(t *testing.T, c *script.Case) {
		synctest.Test(t, func(t *testing.T) {
			var steps []string
			for _, s := range c.Steps {
				line := s.Line
				var from, to, interval int
				if n, _ := fmt.Sscanf(line, "%d-%d/%d", &from, &to, &interval); n == 3 {
					_, step, _ := strings.Cut(line, " ")
					steps = append(steps, every(interval, from, to, step)...)
				} else {
					steps = append(steps, line)
				}
			}
			p := newFakePath()
			p.share = 0
			c.Last().Say(strings.Join(p.play(t, steps), "\n"))
		})
	})
}

func TestSlowReceiverGetsLatestContent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakePath()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go p.run(ctx)
		for _, content := range []string{"two", "three"} {
			synctest.Wait()
			p.do("swap", content)
		}
		synctest.Wait()
		if got := <-p.out; got != "three" {
			t.Errorf("got %q, want the latest", got)
		}
		select {
		case got := <-p.out:
			t.Errorf("got %q, too", got)
		case <-time.After(time.Hour):
		}
	})
}

func TestUnchangedFilesAreNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakePath()
		p.following(t, func(string) {}, func() {
			time.Sleep(time.Hour)
			for range 100 {
				p.report("/unrelated", fsnotify.Create)
				synctest.Wait()
			}
			if p.reads != 1 {
				t.Errorf("%d reads in an hour without a change of the file, want 1: events of others cause none", p.reads)
			}
			p.do("poll", "one")
			synctest.Wait()
			if p.reads != 2 {
				t.Errorf("%d reads after a request, want 2", p.reads)
			}
			p.do("write", "one")
			time.Sleep(time.Hour)
			synctest.Wait()
			if p.reads != 3 {
				t.Errorf("%d reads, want one more if the same is written again", p.reads)
			}
		})
	})
}

func TestChecksOfThePathTakeAtMostHalfAPercentOfTheTime(t *testing.T) {
	for name, change := range map[string]func(p *fakePath, i int){
		"rewritten":       func(p *fakePath, i int) { p.do("write", fmt.Sprint(i)) },
		"truncated, too":  func(p *fakePath, i int) { p.do("write", []string{"", "same"}[i%2]) },
		"one of many":     func(p *fakePath, _ int) { p.do("other", "") },
		"swapped":         func(p *fakePath, i int) { p.do("swap", fmt.Sprint(i)) },
		"flapping":        func(p *fakePath, i int) { p.do("swap", fmt.Sprint(i%2)) },
		"renamed over":    func(p *fakePath, i int) { p.do("rename", fmt.Sprint(i)) },
		"unrelated names": func(p *fakePath, i int) { p.report(fmt.Sprint("/", i), fsnotify.Create) },
		"polled":          func(p *fakePath, _ int) { p.checker.reread() },
	} {
		for _, cost := range []time.Duration{100 * time.Microsecond, 10 * time.Millisecond} {
			t.Run(fmt.Sprint(name, " ", cost), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newFakePath()
					p.cost = cost
					var last string
					var at time.Time
					p.following(t, func(content string) { last, at = content, time.Now() }, func() {
						for i := range 30_000 {
							time.Sleep(time.Millisecond)
							change(p, i)
						}
						p.mu.Lock()
						spent, checks := p.spent, p.checks
						p.mu.Unlock()
						// Five seconds' worth is saved at the start.
						if most := (time.Since(p.start)+5*time.Second)/200 + 2*cost; spent > most {
							t.Errorf("%v of %v spent, at most %v", spent, time.Since(p.start), most)
						} else if spent < most/2 && cost > time.Millisecond {
							t.Errorf("only %v of %v spent: the test sees too little", spent, time.Since(p.start))
						}
						if most := 2 * (checks + 1) * cap(p.events); p.taken > most {
							t.Errorf("%d events taken for %d checks", p.taken, checks)
						}
						time.Sleep(10 * time.Second)
						changed := time.Now()
						p.do("swap", "at last")
						time.Sleep(10 * time.Second)
						synctest.Wait()
						if took := at.Sub(changed); last != "at last" || took != cost {
							t.Errorf("after a quiet time: %q after %v, want it at once", last, took)
						}
					})
				})
			})
		}
	}
}

func TestSlowChecksDelayOthersByAFewSecondsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakePath()
		var at time.Time
		p.following(t, func(string) { at = time.Now() }, func() {
			synctest.Wait()
			p.do("cost", "60000") // perhaps a server is slow
			p.do("swap", "two")
			time.Sleep(time.Minute)
			synctest.Wait()
			p.do("cost", "0")
			done := at
			p.do("swap", "three")
			time.Sleep(time.Minute)
			synctest.Wait()
			// Ten seconds, less those that were saved.
			if took := at.Sub(done); took != 5*time.Second {
				t.Errorf("read again after %v", took)
			}
		})
	})
}

// A process that was stopped, or starved, follows the path at once when it goes on.
func TestStalledCheckDelaysNoSwap(t *testing.T) {
	for _, stall := range []int{50, 1000, 4900} {
		t.Run(fmt.Sprintf("%d ms", stall), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := 20_000 + stall
				got := newFakePath().play(t, []string{
					"20000 hang", "20000 other", fmt.Sprintf("%d answer", end), fmt.Sprintf("%d swap two", end+100),
				})
				if want := []string{"0 one", fmt.Sprintf("%d two", end+100)}; !slices.Equal(got, want) {
					t.Errorf("delivered %q, want %q", got, want)
				}
			})
		})
	}
}

// A slow check, on a busy machine, is followed by a pause of seconds. What was missing before it may be back by then:
// three seconds have to pass before a check that finds it missing.
func TestGapIsOverAtTheFirstCheckThatFindsTheFile(t *testing.T) {
	for _, slow := range []int{0, 10, 50, 100, 2000} {
		t.Run(fmt.Sprintf("%d ms", slow), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := newFakePath().play(t, []string{
					"10000 remove gone",
					fmt.Sprintf("10040 cost %d", slow),
					"10400 create one",
					"12900 cost 0",
					"30000 remove gone",
					"40000 create one",
				})
				if want := []string{"0 one", "33000 gone", "40050 one"}; !slices.Equal(got, want) {
					t.Errorf("delivered %q, want %q", got, want)
				}
			})
		})
	}
}

func TestEndWaitsForTheRunningCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakePath()
		hangs := make(chan struct{})
		p.hangs = hangs
		ctx, stop := context.WithCancel(t.Context())
		ended := false
		go func() {
			p.run(ctx)
			ended = true
		}()
		time.Sleep(time.Minute)
		stop()
		synctest.Wait()
		if ended {
			t.Error("ended before the check")
		}
		close(hangs)
		synctest.Wait()
		if !ended {
			t.Error("the check has returned, and the follower does not end")
		}
	})
}
