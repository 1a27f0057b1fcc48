package watch

import (
	"cmp"
	"context"
	"path/filepath"
	"runtime"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// Follow follows path until ctx is done. It always succeeds. It calls read, one call at a time, to get the content, its
// fingerprint, and the number of files with something in them: equal fingerprints mean equal content, and a content
// with fewer files than the one before has to last. A read error and a missing file are content, too; the number is
// negative if an error does not tell it.
//
// The first content is delivered, and then each one that has settled; a slow receiver gets the last one. The channel is
// never closed. Calling reread makes Follow read the content now, even if the files seem unchanged; the call does not
// wait for that.
func Follow[T any](
	ctx context.Context, path string, read func() (T, string, int),
) (content <-chan T, reread func()) {
	c := make(chan T, 1)
	o := newChecker(path, read, c)
	go newFollower(o).run(ctx)
	return c, o.reread
}

// newChecker returns a checker whose checks deliver what read returns.
func newChecker[T any](path string, read func() (T, string, int), content chan T) *checker {
	return &checker{
		path: path, requests: make(chan struct{}, 1),
		read: func() (func(), string, int) {
			next, fingerprint, present := read()
			return func() { replace(content, next) }, "content " + fingerprint, max(present, unknown)
		},
	}
}

// replace sends a value, in place of one that has not been received.
func replace[T any](c chan T, value T) {
	select {
	case <-c:
	default:
	}
	c <- value
}

// A follower decides when to check the path, and what to deliver.
type follower struct {
	settler
	checker *checker
	check   func(force bool, known files) (r reading, deliver func())
	poll    time.Duration // between two checks without an event
	share   int           // the pause after a check is that many times as long as its processor time
	// processor returns the processor time of the calling thread: a check takes long while the machine is busy, or a file
	// system is slow, but that costs nothing.
	processor func() time.Duration

	next   time.Time // when a check is due
	resume time.Time // a check that is due waits until then
	force  bool      // the next check reads the content in any case
}

func newFollower(c *checker) *follower {
	return &follower{
		settler: settler{quiet: 50 * time.Millisecond, fewerFiles: 3 * time.Second},
		poll:    time.Second, share: 200, checker: c, check: c.check, force: true, processor: threadTime,
	}
}

// run waits for events and for the next poll, and checks the path.
func (f *follower) run(ctx context.Context) {
	for {
		events := f.checker.events
		if !time.Now().Before(f.next) {
			events = nil // a check is due; until then, the kernel merges or drops events
		}
		select {
		case <-ctx.Done():
			f.checker.close()
			return
		case <-f.checker.requests:
			f.force = true
			f.next = time.Now()
		case e := <-events:
			f.handleEvent(e)
		case <-time.After(max(time.Until(f.next), time.Until(f.resume))):
			f.checkNow()
		}
	}
}

// handleEvent makes a check due, which finds out what has changed. It cannot tell whether there was a second write
// within a tick of the kernel's clock, so it reads the content in any case, nor whether a file was renamed over another
// one or created after that was removed: that is in the event.
func (f *follower) handleEvent(e fsnotify.Event) {
	for _, entry := range f.settled.files {
		if entry.path == filepath.Clean(e.Name) {
			f.force = true
			f.reported = cmp.Or(f.reported, e.Op&(fsnotify.Create|fsnotify.Remove|fsnotify.Rename))
		}
	}
	f.next = time.Now()
}

// checkNow checks the path, and delivers the content if it has settled. First it handles the events that are queued:
// they are about what this check sees, and would cause another one.
func (f *follower) checkNow() {
	begin := time.Now()
	for range cap(f.checker.events) {
		select {
		case e := <-f.checker.events:
			f.handleEvent(e)
		default:
		}
	}
	runtime.LockOSThread()
	spent := f.processor()
	r, deliver := f.check(f.force, f.settled.files)
	cost := f.processor() - spent
	runtime.UnlockOSThread()
	end := time.Now()
	f.pause(end, cost)
	f.force = false
	f.next = end.Add(f.poll)
	if r.id == "" {
		return
	}
	isNew, retry := f.step(begin, end, r)
	if isNew {
		deliver()
	}
	if f.pending != "" {
		f.force = true
		if retry.Before(f.next) {
			f.next = retry
		}
	}
}

// threadTime returns the processor time of the calling thread, 0 if the kernel does not tell it.
func threadTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// pause makes the next check wait after one that took some processor time.
func (f *follower) pause(now time.Time, cost time.Duration) {
	const (
		longest = 10 * time.Second
		saved   = 5 * time.Second // of pauses, while there was nothing to check
	)
	if f.resume.Before(now.Add(-saved)) {
		f.resume = now.Add(-saved)
	}
	f.resume = f.resume.Add(min(time.Duration(f.share)*cost, longest))
}
