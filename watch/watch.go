package watch

import (
	"context"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A Watcher follows the content of one path.
type Watcher[T any] struct {
	source
	read     func(place string) (content T, fingerprint string)
	settle   settler
	content  chan T
	warnings chan error
	done     chan struct{}

	// Only run and poll use these.
	last        time.Time // when read was last called
	found       T         // the content that has settled
	fingerprint string    // of found
	unreported  []error   // warnings
}

// source is the observer as a Watcher uses it.
type source struct {
	arm  func() armed
	peek func() change // the changes since the last take
	take func() change
	note func(change)
	wake <-chan struct{} // receives a token when something happened
}

// Start follows path until ctx is done. It calls read, from one goroutine, to get
// the content and its fingerprint: equal fingerprints mean equal content. A read
// error and a missing file are content, too. The function must not block for
// long; it may be called at any time, also for content that is not delivered. Its
// argument identifies the files that the path leads to: it differs for other files,
// and is "" if a file system on the way does not respond.
func Start[T any](ctx context.Context, path string, read func(place string) (content T, fingerprint string)) *Watcher[T] {
	return start(ctx, defaultTiming(), newObserver(path, fsnotify.NewWatcher), read)
}

func start[T any](ctx context.Context, p timing, o *observer, read func(place string) (T, string)) *Watcher[T] {
	arm := armer{observer: o, limit: p.arm}
	w := newWatcher(source{arm: arm.try, peek: o.peek, take: o.take, note: o.note, wake: o.wake}, p, read)
	go func() {
		defer close(w.done)
		defer func() { arm.observer.close() }()
		w.run(ctx)
	}()
	return w
}

func newWatcher[T any](s source, p timing, read func(place string) (T, string)) *Watcher[T] {
	return &Watcher[T]{
		source: s, read: read, settle: settler{timing: p},
		content: make(chan T), warnings: make(chan error), done: make(chan struct{}),
	}
}

// Content delivers the first content and then every settled one that differs
// from the one delivered before. It is never closed.
func (w *Watcher[T]) Content() <-chan T { return w.content }

// Warnings delivers each warning once: that inotify is exhausted or may not watch
// a directory, so that only Poll finds changes; that the path is a single-file
// mount, which does not follow its source. It is never closed, and need not be
// read.
func (w *Watcher[T]) Warnings() <-chan error { return w.warnings }

// Poll makes the watcher read the content now, as if something had happened, and
// renew its watches. It does not wait for this.
func (w *Watcher[T]) Poll() { w.note(polled) }

// Done is closed when ctx is done and nothing of the watcher is left: no
// goroutine and no file descriptor, unless a call hangs on a dead mount.
func (w *Watcher[T]) Done() <-chan struct{} { return w.done }

// run is the main loop: wait for an event, poll, deliver what has settled.
func (w *Watcher[T]) run(ctx context.Context) {
	var (
		out       chan T // nil while there is nothing to deliver
		begun     bool   // whether anything was delivered
		delivered string // fingerprint of what was delivered last
	)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var (
			warn    chan error // nil while there is no warning
			warning error
		)
		if len(w.unreported) > 0 {
			warn, warning = w.warnings, w.unreported[0]
		}
		select {
		case <-ctx.Done():
			return
		case warn <- warning:
			w.unreported = w.unreported[1:]
			continue
		case out <- w.found:
			begun, delivered, out = true, w.fingerprint, nil
			continue
		case <-w.wake:
			if w.peek() == 0 {
				continue // an earlier poll has handled it
			}
		case <-timer.C:
		}
		settled, wait := w.poll()
		if settled {
			out = w.content
			if begun && w.fingerprint == delivered {
				out = nil // it is back before anything else was delivered
			}
		}
		timer.Stop()
		if wait > 0 {
			timer.Reset(wait)
		}
	}
}

// poll reads the content and reports whether it is settled and new, and when to
// poll again (zero: on the next event).
func (w *Watcher[T]) poll() (settled bool, wait time.Duration) {
	if wait := w.settle.delay(time.Now(), w.last, w.peek()); wait > 0 {
		return false, wait
	}
	c := w.take()
	// Renew the watches first, so that no change after reading is missed.
	now := w.arm()
	w.unreported = append(w.unreported, now.warnings...)
	content, fingerprint := w.read(now.seen.place())
	w.last = time.Now()
	// What happened meanwhile may have been read already. It counts for this
	// poll, and causes another one.
	c = c.then(w.peek(), len(now.seen) <= 1)
	settled, wait = w.settle.step(w.last, c, now.seen, fingerprint)
	if settled {
		w.found, w.fingerprint = content, fingerprint
	}
	if !now.stable {
		wait = w.settle.spacing
	}
	return settled, wait
}

// maxHung bounds the observers that hang, each with a thread.
const maxHung = 3

// An armer renews the watches within a time limit.
type armer struct {
	observer *observer
	limit    time.Duration
}

// armed is the result of renewing the watches.
type armed struct {
	seen     snapshot // nil if the path leads to a file system that does not respond
	stable   bool     // false: the path changed faster than it could be followed
	warnings []error  // new ones
}

// try renews the watches. If an observer takes too long, another one replaces it and
// avoids the step in which the first one hangs. If too many hang, the result has no
// snapshot.
func (a *armer) try() armed {
	for a.observer.mayTry() {
		o := a.observer
		done := make(chan armed, 1)
		go func() { done <- o.arm() }()
		select {
		case r := <-done:
			return r
		case <-time.After(a.limit):
		}
		a.observer = o.successor()
		o.abandon(done)
	}
	return armed{stable: true}
}
