package watch

import (
	"context"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A Watcher follows the content of one path.
type Watcher[T any] struct {
	content  chan T
	warnings chan error
	note     func(change)
	done     chan struct{}
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
	w := newWatcher[T](o.note)
	arm := armer{observer: o, limit: p.arm}
	go func() {
		defer close(w.done)
		defer func() { arm.observer.close() }()
		w.run(ctx, &poller[T]{
			source: source{arm: arm.try, peek: o.peek, take: o.take, wake: o.wake},
			settle: settler{timing: p},
			read:   read,
		})
	}()
	return w
}

func newWatcher[T any](note func(change)) *Watcher[T] {
	return &Watcher[T]{
		content:  make(chan T),
		warnings: make(chan error),
		note:     note,
		done:     make(chan struct{}),
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
func (w *Watcher[T]) run(ctx context.Context, l *poller[T]) {
	var (
		next      finding[T]
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
		if len(l.warnings) > 0 {
			warn, warning = w.warnings, l.warnings[0]
		}
		select {
		case <-ctx.Done():
			return
		case warn <- warning:
			l.warnings = l.warnings[1:]
			continue
		case out <- next.content:
			begun, delivered, out = true, next.fingerprint, nil
			continue
		case <-l.wake:
			if l.peek() == 0 {
				continue // an earlier poll has handled it
			}
		case <-timer.C:
		}
		found, wait := l.poll()
		if found != nil {
			next, out = *found, w.content
			if begun && next.fingerprint == delivered {
				out = nil // it is back before anything else was delivered
			}
		}
		timer.Stop()
		if wait > 0 {
			timer.Reset(wait)
		}
	}
}

// maxHung bounds the observers that hang, each with a thread.
const maxHung = 3

// An armer renews the watches within a time limit.
type armer struct {
	observer *observer
	limit    time.Duration
}

type armed struct {
	seen     snapshot
	stable   bool
	warnings []error
}

// try renews the watches. If that takes too long, another observer takes over,
// which does not take the step in which the first one hangs. The snapshot is nil if
// the path leads there, or if too many hang.
func (a *armer) try() (snapshot, bool, []error) {
	for a.observer.mayTry() {
		o := a.observer
		done := make(chan armed, 1)
		go func() {
			var r armed
			r.seen, r.stable, r.warnings = o.arm()
			done <- r
		}()
		select {
		case r := <-done:
			return r.seen, r.stable, r.warnings
		case <-time.After(a.limit):
		}
		a.observer = o.successor()
		o.abandon(done)
	}
	return nil, true, nil
}

// source is the observer as a poller uses it.
type source struct {
	arm  func() (s snapshot, stable bool, warnings []error)
	peek func() change // the changes since the last take
	take func() change
	wake <-chan struct{} // receives a token when something happened
}

// A poller reads the content and decides whether it has settled.
type poller[T any] struct {
	source
	settle   settler
	read     func(place string) (T, string)
	last     time.Time // when read was last called
	warnings []error   // not yet delivered
}

type finding[T any] struct {
	content     T
	fingerprint string
}

// poll returns the content if it is settled and new, and when to poll again
// (zero: on the next event).
func (l *poller[T]) poll() (found *finding[T], wait time.Duration) {
	if wait := l.settle.delay(time.Now(), l.last, l.peek()); wait > 0 {
		return nil, wait
	}
	c := l.take()
	// Renew the watches first, so that no change after reading is missed.
	now, stable, warnings := l.arm()
	l.warnings = append(l.warnings, warnings...)
	content, fingerprint := l.read(now.place())
	l.last = time.Now()
	// What happened meanwhile may have been read already. It counts for this
	// poll, and causes another one.
	c = c.then(l.peek(), len(now) <= 1)
	done, wait := l.settle.step(l.last, c, now, fingerprint)
	if done {
		found = &finding[T]{content, fingerprint}
	}
	if !stable {
		wait = l.settle.spacing
	}
	return found, wait
}
