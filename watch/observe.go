package watch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// An observer notices changes along a path. Call arm from one goroutine only.
type observer struct {
	*observed
	pumps   sync.WaitGroup
	inotify *fsnotify.Watcher
	mounts  *os.File
	armed   map[string]identity // the watched directories

	asking step   // the last step of arm
	route  *route // the watched one: filters events
}

// observed is what the observers of one path share: the current one, and those
// whose call of arm hangs on a dead mount.
type observed struct {
	path string
	open func() (*fsnotify.Watcher, error)
	wake chan struct{} // receives a token when something happened

	mu       sync.Mutex // for all of this, and for asking and route
	seen     change
	reported map[string]bool
	pending  []error
	hung     map[*observer]bool
}

func newObserver(path string, open func() (*fsnotify.Watcher, error)) *observer {
	o := &observer{observed: &observed{
		path: path, open: open,
		wake:     make(chan struct{}, 1),
		reported: map[string]bool{},
		hung:     map[*observer]bool{},
	}}
	return o.successor()
}

// successor returns another observer of the path.
func (o *observer) successor() *observer {
	return &observer{observed: o.observed, armed: map[string]identity{}, route: &route{}}
}

// ask reports whether a step may be taken: not if another observer hangs in it.
func (o *observer) ask(s step) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for other := range o.hung {
		if other.asking == s {
			return false
		}
	}
	o.asking = s
	return true
}

// mayTry reports whether arm may be called.
func (o *observer) mayTry() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.hung) < maxHung
}

// abandon closes an observer whose call of arm hangs, as soon as it returns.
func (o *observer) abandon(returned <-chan armed) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.hung[o] = true
	go func() {
		<-returned
		o.close()
		o.mu.Lock()
		delete(o.hung, o)
		o.mu.Unlock()
		o.note(polled)
	}()
}

// close stops the observer's goroutines and releases their resources.
func (o *observer) close() {
	if o.inotify != nil {
		o.inotify.Close() // always nil on Linux once the descriptor is closed
	}
	if o.mounts != nil {
		o.mounts.Close()
	}
	o.pumps.Wait()
}

// arm renews the watches. After that, every change is noticed. If the path changed
// faster than it could be followed, the result is not stable, and the caller calls arm
// again. If the path leads to a step in which another observer hangs, the result has
// no snapshot.
func (o *observer) arm() (a armed) {
	o.start()
	r := resolve(o.path, o.ask)
	for range 4 {
		a.stable = o.watch(r)
		// A change before the watch existed caused no event.
		before := r
		r = resolve(o.path, o.ask)
		if a.stable = a.stable && reflect.DeepEqual(r.dirs, before.dirs); a.stable {
			break
		}
	}
	for _, path := range r.mounted {
		o.warn("mount "+path, fmt.Errorf("%q: mounted as a single file (a subPath or file bind mount): "+
			"it keeps showing the old file when the source is replaced; mount its directory instead", path))
	}
	if !r.blocked {
		a.seen = r.snapshot
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	a.warnings, o.pending = o.pending, nil
	return a
}

// start opens the event sources, or retries those that failed.
func (o *observer) start() {
	if o.inotify == nil {
		w, err := o.open()
		if err != nil {
			o.inotifyFailed(err)
		} else {
			o.inotify = w
			o.pumps.Go(func() { o.pump(w) })
		}
	}
	if o.mounts == nil {
		// No warning if /proc is missing: Poll finds mounts too.
		if f, err := os.Open("/proc/self/mountinfo"); err == nil {
			o.mounts = f
			o.pumps.Go(func() { o.pumpMounts(f) })
		}
	}
}

// watch sets the watches to those of r and reports whether all directories of r
// still exist.
func (o *observer) watch(r *route) bool {
	o.mu.Lock()
	o.route = r
	o.mu.Unlock()
	if o.inotify == nil {
		return true
	}
	for path, id := range o.armed {
		if d := r.byPath[path]; d == nil || d.path != path || d.id != id {
			o.disarm(path)
		}
	}
	all := true
	for _, d := range r.dirs {
		if !o.ask(step{d.id, ""}) {
			continue
		}
		// Added again each time, because only the kernel knows whether the watch
		// still exists: the inode may be a new one with an old number, or the
		// file system may have been unmounted and mounted again.
		err := o.inotify.Add(d.path)
		switch {
		case err == nil:
			o.armed[d.path] = d.id
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			all = false // it is no longer what it was
		default:
			o.inotifyFailed(fmt.Errorf("%q: %w", d.path, err))
		}
	}
	return all
}

// disarm removes the watch of a directory, which may be gone already.
func (o *observer) disarm(path string) {
	delete(o.armed, path)
	// In fsnotify 1.10.1, Remove panics for a path that has lost its watch
	// because, when added again, it led to a directory watched under another
	// path.
	defer func() { _ = recover() }()
	_ = o.inotify.Remove(path)
}

// inotifyFailed warns, once per errno, that inotify does not work.
func (o *observer) inotifyFailed(err error) {
	var errno unix.Errno
	errors.As(err, &errno)
	hint := map[unix.Errno]string{
		unix.EMFILE: " (fs.inotify.max_user_instances, or the limit of open files)",
		unix.ENOSPC: " (fs.inotify.max_user_watches)",
	}[errno]
	o.warn("inotify "+errno.Error(), fmt.Errorf("inotify: %w%s: some changes are found by polling only", err, hint))
}

func (o *observer) warn(key string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.reported[key] {
		o.reported[key] = true
		o.pending = append(o.pending, err)
	}
}

// pump reads everything at once, so that the kernel's queue does not overflow
// while content is read. It also reads errors: fsnotify holds its lock while it
// sends some of them.
func (o *observer) pump(w *fsnotify.Watcher) {
	for {
		select {
		case e, ok := <-w.Events:
			if !ok {
				return
			}
			o.note(o.classify(e))
		case _, ok := <-w.Errors:
			if !ok {
				return
			}
			o.note(polled) // the queue overflowed: anything may have happened
		}
	}
}

// pumpMounts waits for changes to the mount table. The kernel wakes pollers of
// the file (proc_pid_mountinfo(5)); returning false from the callback means:
// wait.
func (o *observer) pumpMounts(f *os.File) {
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	first := true
	_ = conn.Read(func(uintptr) bool { // ends with an error when f is closed
		if !first { // the first call is before any waiting
			o.note(polled)
		}
		first = false
		return false
	})
}

// classify returns what an event means for the path, zero if nothing.
func (o *observer) classify(e fsnotify.Event) change {
	o.mu.Lock()
	defer o.mu.Unlock()
	if d, ok := o.route.byPath[filepath.Dir(e.Name)]; ok {
		if as, ok := d.names[filepath.Base(e.Name)]; ok || d.all {
			return as.change(e.Op)
		}
	}
	// The watched directory itself is gone; usually its parent's event comes first.
	if _, ok := o.route.byPath[e.Name]; ok && e.Op&(fsnotify.Remove|fsnotify.Rename) != 0 {
		return removed
	}
	return 0
}

// change returns what an operation on a name means. A name that was not on the
// route (zero) can only become a file in a directory that is followed.
func (r role) change(op fsnotify.Op) change {
	switch {
	case r != 0 && op&(fsnotify.Remove|fsnotify.Rename) != 0:
		return removed
	case r == passage && op.Has(fsnotify.Create):
		return swapped
	case op.Has(fsnotify.Create):
		return created
	case op.Has(fsnotify.Write):
		return written
	default:
		return polled
	}
}

// note records a change and wakes the waiting goroutine.
func (o *observer) note(c change) {
	if c == 0 {
		return
	}
	o.mu.Lock()
	o.seen = o.seen.then(c, o.route.single)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// peek returns the changes since the last take.
func (o *observer) peek() change {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen
}

func (o *observer) take() change {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.seen
	o.seen = 0
	return c
}
