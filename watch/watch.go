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

// Follow follows path until ctx is done. It calls read, one call at a time, to get the
// content, its fingerprint, and the number of files with something in them: equal
// fingerprints mean equal content, and a content with fewer files than the one before
// has to last. A read error and a missing file are content, too; the number is negative if
// an error does not tell it.
//
// The first content is delivered, and then each one that has settled; a slow receiver
// gets the last one. The channel is never closed. Calling reread makes Follow read the content
// now, even if the files seem unchanged; the call does not wait for that.
func Follow[T any](
	ctx context.Context, path string, read func() (T, string, int),
) (content <-chan T, reread func()) {
	c := make(chan T, 1)
	o := newChecker(path, read, c)
	go newFollower(o).run(ctx)
	return c, o.reread
}

// newObserver returns an observer whose checks deliver what read returns.
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
	check   func(read bool, known files) (r reading, deliver func())
	poll    time.Duration // between two checks without an event
	share   int           // after a check, the next one is that many times as far away as its processor time
	// processor returns the processor time of the calling thread: a check takes long while the machine is busy, or a
	// file system is slow, but that costs nothing.
	processor func() time.Duration

	next   time.Time // when a check is due
	resume time.Time // until then it waits
	force  bool      // it reads the content in any case
}

func newFollower(o *checker) *follower {
	return &follower{
		settler: settler{quiet: 50 * time.Millisecond, fewerFiles: 3 * time.Second},
		poll:    time.Second, share: 200, checker: o, check: o.check, force: true, processor: threadTime,
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

// event handles an event. The next check finds out what has changed, except for a second
// write within a tick of the kernel's clock, and whether a file was renamed over another
// one or created after that was removed.
func (f *follower) handleEvent(e fsnotify.Event) {
	for _, entry := range f.settled.files {
		if entry.path == filepath.Clean(e.Name) {
			f.force = true
			f.reported = cmp.Or(f.reported, e.Op&(fsnotify.Create|fsnotify.Remove|fsnotify.Rename))
		}
	}
	f.next = time.Now()
}

// due checks the path, and delivers the content if it has settled.
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
	settled, retry := f.step(begin, end, r)
	if settled {
		deliver()
	}
	if f.pending != "" {
		f.force = true
		if retry.Before(f.next) {
			f.next = retry
		}
	}
}

func threadTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// pause makes the next check wait after one that cost some processor time.
func (f *follower) pause(now time.Time, cost time.Duration) {
	const (
		longest = 10 * time.Second
		saved   = 5 * time.Second // while there is nothing to check
	)
	if f.resume.Before(now.Add(-saved)) {
		f.resume = now.Add(-saved)
	}
	f.resume = f.resume.Add(min(time.Duration(f.share)*cost, longest))
}
