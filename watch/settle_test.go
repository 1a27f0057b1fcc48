package watch

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A fakeFile is a file as an observer sees it.
type fakeFile struct {
	start time.Time
	wake  chan struct{}

	mu       sync.Mutex
	content  string
	file     target
	pending  change
	unstable bool
	reads    int
}

func newFakeFile() *fakeFile {
	w := &fakeFile{start: time.Now(), wake: make(chan struct{}, 1), content: "one"}
	w.file = target{exists: true, size: 3, id: identity{inode: 1}, mtime: time.Now().Add(-time.Hour)}
	return w
}

// do applies an operation to the file, and notifies as inotify would.
func (w *fakeFile) do(word, content string) {
	w.mu.Lock()
	w.content, w.file.size = content, uint64(len(content))
	w.file.exists = word != "remove"
	if word != "poll" {
		w.file.mtime = time.Now()
	}
	var c change
	switch word {
	case "write": // in place
		c = written
	case "silently": // in place, but without an event
	case "put": // an older complete file, but without an event
		w.file.id.inode++
		w.file.mtime = time.Now().Add(-time.Hour)
	case "create", "rename":
		w.file.id.inode++
		c = created
	case "swap":
		w.file.id.inode++
		w.file.links = fmt.Sprint(w.file.id.inode)
		c = swapped
	case "remove":
		c = removed
	case "poll":
		c = polled
	}
	w.mu.Unlock()
	if c != 0 {
		w.note(c)
	}
}

func (w *fakeFile) note(c change) {
	w.mu.Lock()
	w.pending = w.pending.then(c, true)
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *fakeFile) arm() armed {
	w.mu.Lock()
	defer w.mu.Unlock()
	stable := !w.unstable
	w.unstable = false
	return armed{seen: snapshot{"file": w.file}, stable: stable}
}

func (w *fakeFile) peek() change {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pending
}

func (w *fakeFile) take() change {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.pending
	w.pending = 0
	return c
}

func (w *fakeFile) read(string) (content, fingerprint string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reads++
	return w.content, w.content
}

func (w *fakeFile) watch(ctx context.Context) *Watcher[string] {
	watcher := newWatcher(source{arm: w.arm, peek: w.peek, take: w.take, note: w.note, wake: w.wake}, defaultTiming(), w.read)
	go watcher.run(ctx)
	return watcher
}

// play does each step ("MILLISECONDS WORD CONTENT") at its time and returns
// what was delivered until a second after the last ("MILLISECONDS CONTENT").
// The watcher starts at 0, after the steps of that time.
func (w *fakeFile) play(t *testing.T, steps []string) []string {
	ctx, stop := context.WithCancel(t.Context())
	var got []string
	var receiver sync.WaitGroup
	receive := func() {
		for content := w.watch(ctx).Content(); ; {
			select {
			case c := <-content:
				got = append(got, fmt.Sprintf("%d %s", time.Since(w.start).Milliseconds(), c))
			case <-ctx.Done():
				return
			}
		}
	}
	for len(steps) > 0 && strings.HasPrefix(steps[0], "0 ") {
		w.step(t, steps[0])
		steps = steps[1:]
	}
	receiver.Go(receive)
	for _, step := range steps {
		synctest.Wait()
		w.step(t, step)
	}
	time.Sleep(time.Second)
	stop()
	receiver.Wait()
	return got
}

func (w *fakeFile) step(t *testing.T, step string) {
	at, rest, _ := strings.Cut(step, " ")
	word, content, _ := strings.Cut(rest, " ")
	ms, err := strconv.Atoi(at)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Until(w.start.Add(time.Duration(ms) * time.Millisecond)))
	w.do(word, content)
}

func every(interval, from, to int, format string) (steps []string) {
	for at := from; at < to; at += interval {
		steps = append(steps, fmt.Sprintf("%d "+format, at, at))
	}
	return steps
}

func TestContentIsDeliveredWhenSettled(t *testing.T) {
	for _, tt := range []struct {
		name  string
		steps []string
		want  []string
	}{
		{
			"the first at once, nothing after it",
			nil,
			[]string{"0 one"},
		}, {
			"a file just written is read twice at start",
			[]string{"0 silently tw", "20 write two"},
			[]string{"70 two"},
		}, {
			"a link to a file just written is settled at start",
			[]string{"0 swap two"},
			[]string{"0 two"},
		}, {
			"a busy writer at start delays it by half a second",
			append([]string{"0 silently new"}, every(10, 5, 1000, "write %d")...),
			[]string{"500 495", "1045 995"},
		}, {
			"a swapped link at once",
			[]string{"100 swap two", "101 swap three"},
			[]string{"0 one", "100 two", "101 three"},
		}, {
			"a rename over the file at once, even to an empty one",
			[]string{"100 rename two", "200 rename"},
			[]string{"0 one", "100 two", "200 "},
		}, {
			"a write in place after 50 ms",
			[]string{"100 write two"},
			[]string{"0 one", "150 two"},
		}, {
			"a truncated file not before it is written",
			[]string{"100 write", "130 write two"},
			[]string{"0 one", "180 two"},
		}, {
			"writes in quick succession are read together",
			[]string{"100 write", "101 write t", "102 write tw", "103 write two"},
			[]string{"0 one", "160 two"},
		}, {
			"a slow writer's last word only",
			every(40, 100, 2000, "write %d"),
			[]string{"0 one", "2030 1980"},
		}, {
			"a writer slower than that should rename",
			[]string{"100 write tw", "151 write two"},
			[]string{"0 one", "150 tw", "201 two"},
		}, {
			"a swap ends the waiting for a writer",
			append(every(10, 100, 2000, "write %d"), "2000 rename two"),
			[]string{"0 one", "2000 two"},
		}, {
			"writes before a swap are not waited for",
			[]string{"100 write tw", "100 swap two"},
			[]string{"0 one", "100 two"},
		}, {
			"a writer after a swap is waited for",
			[]string{"100 swap two", "110 write thr", "120 write three"},
			[]string{"0 one", "100 two", "170 three"},
		}, {
			"a file that vanished after 50 ms",
			[]string{"100 remove gone"},
			[]string{"0 one", "150 gone"},
		}, {
			"removed and replaced by rename is one change",
			[]string{"100 remove gone", "120 rename two"},
			[]string{"0 one", "125 two"},
		}, {
			"removed and written again is one change",
			[]string{"100 remove gone", "101 create", "130 write two"},
			[]string{"0 one", "180 two"},
		}, {
			"a new file that is being written, after the writing",
			[]string{"100 remove gone", "200 create tw", "202 write two"},
			[]string{"0 one", "150 gone", "260 two"},
		}, {
			"a new complete file after a moment",
			[]string{"100 remove gone", "200 create two"},
			[]string{"0 one", "150 gone", "205 two"},
		}, {
			"a poll finds another file at once",
			[]string{"100 put two", "200 poll two"},
			[]string{"0 one", "200 two"},
		}, {
			"a poll that finds the file changed reads twice",
			[]string{"100 silently two", "200 poll two"},
			[]string{"0 one", "250 two"},
		}, {
			"two reads that differ are not settled",
			[]string{"100 silently tw", "200 poll tw", "220 silently two"},
			[]string{"0 one", "300 two"},
		}, {
			"polls do not extend the wait",
			[]string{"100 write two", "120 poll two", "140 poll two"},
			[]string{"0 one", "150 two"},
		}, {
			"content that is restored is not a change",
			[]string{"100 write two", "120 write one", "200 remove gone", "220 create one"},
			[]string{"0 one"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := newFakeFile().play(t, tt.steps)
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("delivered, in milliseconds (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestBusyWriterIsReadAtMostHundredTimesPerSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeFile()
		w.play(t, every(1, 100, 1100, "write %d"))
		if w.reads > 105 {
			t.Errorf("%d reads for 1,000 writes in one second", w.reads)
		}
	})
}

func TestSlowReceiverGetsLatestContent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeFile()
		watcher := w.watch(t.Context())
		swap := func(content string) {
			w.do("swap", content)
			synctest.Wait()
		}
		swap("two")
		swap("three")
		if got := <-watcher.Content(); got != "three" {
			t.Errorf("got %q, want the latest", got)
		}
		swap("four")
		swap("three")
		select {
		case got := <-watcher.Content():
			t.Errorf("got %q, but the receiver has that content", got)
		case <-time.After(time.Hour):
		}
	})
}

func TestUnstablePathIsPolledAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeFile()
		watcher := w.watch(t.Context())
		<-watcher.Content()
		w.mu.Lock()
		w.unstable = true
		w.mu.Unlock()
		watcher.Poll()
		synctest.Wait()
		w.do("put", "two") // causes no event
		if got := <-watcher.Content(); got != "two" {
			t.Errorf("got %q", got)
		}
	})
}

func TestSwapOfOneFileDoesNotSettleAnother(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	old := start.Add(-time.Hour)
	a := target{exists: true, id: identity{inode: 1}, size: 1, mtime: old}
	b := target{exists: true, id: identity{inode: 2}, size: 1, mtime: old}
	s := settler{timing: defaultTiming()}
	if done, _ := s.step(start, 0, snapshot{"a": a, "b": b}, "a1 b1"); !done {
		t.Fatal("the first content has not settled")
	}
	at := start.Add(time.Second)
	if done, _ := s.step(at, written, snapshot{"a": a, "b": b}, "a b1"); done {
		t.Error("settled in the middle of a write")
	}
	b.id.inode, b.mtime = 3, at
	if done, wait := s.step(at, created, snapshot{"a": a, "b": b}, "a b2"); done || wait != s.quiet {
		t.Errorf("after the swap of b: settled %v, poll again after %v, want after %v", done, wait, s.quiet)
	}
}

// A poll can take its snapshot before a swap and read after it, before any event
// has arrived.
func TestSwapOfAllFilesSettlesContentReadBeforeItsEvent(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	file := func(links string, inode uint64) target {
		return target{exists: true, links: links, id: identity{inode: inode}, mtime: at}
	}
	before := snapshot{"a": file("..1/a", 1), "b": file("..1/b", 2)}
	after := snapshot{"a": file("..2/a", 3), "b": file("..2/b", 4)}
	s := settler{timing: defaultTiming()}
	s.first = 0
	if done, _ := s.step(at, 0, before, "one"); !done {
		t.Fatal("the first content has not settled")
	}
	at = at.Add(time.Second)
	if done, wait := s.step(at, polled, before, "two"); done || wait != s.quiet {
		t.Errorf("before the event: settled %v, poll again after %v", done, wait)
	}
	if done, _ := s.step(at, swapped, after, "two"); !done {
		t.Error("not settled after the swap of all files")
	}
}

func TestLatePollWaitsForQueuedEvents(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	files := snapshot{"file": target{exists: true, id: identity{inode: 1}, mtime: at.Add(-time.Hour)}}
	s := settler{timing: defaultTiming()}
	s.step(at, 0, files, "one")
	s.step(at, written, files, "")
	at = at.Add(time.Second) // requested: 50 ms
	if done, wait := s.step(at, 0, files, ""); done || wait != s.grace {
		t.Errorf("late: settled %v, poll again after %v", done, wait)
	}
	at = at.Add(time.Second) // late again, but only the first time matters
	if done, _ := s.step(at, 0, files, ""); !done {
		t.Error("late again: not settled")
	}
}
