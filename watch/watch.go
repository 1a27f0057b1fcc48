package watch

import (
	"context"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A Watcher follows the content behind one path.
type Watcher[T any] struct {
	content  chan T
	warnings chan error
	note     func(change)
	done     chan struct{}
}

// Start follows path until ctx ends. It calls read, from one goroutine, to get
// the content and its fingerprint: equal fingerprints mean equal content. An
// error while reading, or that nothing is there, is content too. Read must not
// block for long; it may be called at any time, also for content that is not
// delivered.
func Start[T any](ctx context.Context, path string, read func() (content T, fingerprint string)) *Watcher[T] {
	return start(ctx, usual(), newObserver(path, fsnotify.NewWatcher), read)
}

func start[T any](ctx context.Context, p tempo, o *observer, read func() (T, string)) *Watcher[T] {
	w := newWatcher[T](o.note)
	arm := armer{arm: o.arm, limit: armTime}
	go func() {
		defer close(w.done)
		defer func() {
			if arm.pending == nil {
				o.close()
			}
		}()
		w.run(ctx, &looker[T]{
			senses: senses{arm: arm.try, peek: o.peek, take: o.take, wake: o.wake},
			settle: settler{tempo: p},
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

// Warnings delivers what is worth knowing, each once: that inotify is exhausted
// or may not watch a directory, so that changes are found by Look alone; that
// the path is a single-file mount, which does not follow its source. It is
// never closed, and need not be read.
func (w *Watcher[T]) Warnings() <-chan error { return w.warnings }

// Look makes the watcher look now, as if something had happened, and renew its
// watches. It does not wait for that.
func (w *Watcher[T]) Look() { w.note(asked) }

// Done is closed when ctx has ended and nothing of the watcher is left: no
// goroutine and no file descriptor, unless a dead mount holds a call.
func (w *Watcher[T]) Done() <-chan struct{} { return w.done }

// run is the loop: something happens, look, deliver what has settled.
func (w *Watcher[T]) run(ctx context.Context, l *looker[T]) {
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
			warn    chan error // nil while there is nothing to say
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
				continue // an earlier look has seen it
			}
		case <-timer.C:
		}
		found, wait := l.look()
		if found != nil {
			next, out = *found, w.content
			if begun && next.fingerprint == delivered {
				out = nil // back to it before anything else was delivered
			}
		}
		timer.Stop()
		if wait > 0 {
			timer.Reset(wait)
		}
	}
}

// armTime is how long renewing the watches may take. On a dead mount it never
// ends.
const armTime = 2 * time.Second

// An armer renews the watches within a time.
type armer struct {
	arm     func() (sight, bool, []error)
	limit   time.Duration
	pending chan armed // a call that has not ended in time
}

type armed struct {
	seen     sight
	stable   bool
	warnings []error
}

// try renews the watches. If that takes too long, it returns that nothing is there:
// reading tells what is wrong. While a call has not ended there is no other.
func (a *armer) try() (sight, bool, []error) {
	limit := a.limit
	done := a.pending
	if done != nil {
		limit = 0
	} else {
		done = make(chan armed, 1)
		go func() {
			var r armed
			r.seen, r.stable, r.warnings = a.arm()
			done <- r
		}()
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case r := <-done:
		a.pending = nil
		return r.seen, r.stable, r.warnings
	case <-timer.C:
		a.pending = done
		return nil, true, nil
	}
}

// senses is what a looker knows of the world: an observer's methods.
type senses struct {
	arm  func() (s sight, stable bool, warnings []error)
	peek func() change // what happened since the last take
	take func() change
	wake <-chan struct{} // has a token after something happened
}

// A looker looks at the path and judges what it finds.
type looker[T any] struct {
	senses
	settle   settler
	read     func() (T, string)
	last     time.Time // when read was last called
	warnings []error   // not yet delivered
}

type finding[T any] struct {
	content     T
	fingerprint string
}

// look returns what it found if that is settled and new, and after which time
// to look again (zero: when something happens).
func (l *looker[T]) look() (found *finding[T], wait time.Duration) {
	if wait := l.settle.defers(time.Now(), l.last, l.peek()); wait > 0 {
		return nil, wait
	}
	c := l.take()
	// Watches first, so that no change after the reading is missed.
	now, stable, warnings := l.arm()
	l.warnings = append(l.warnings, warnings...)
	content, fingerprint := l.read()
	l.last = time.Now()
	// What happened meanwhile may have been read already. It counts now, and
	// will be looked at again.
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
