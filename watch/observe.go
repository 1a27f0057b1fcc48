package watch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// An observer notices what happens along a path. Its arm is called from one
// goroutine only.
type observer struct {
	path  string
	open  func() (*fsnotify.Watcher, error)
	wake  chan struct{} // has a token when something happened
	pumps sync.WaitGroup

	inotify *fsnotify.Watcher
	mounts  *os.File
	armed   map[string]identity // the directories watched
	said    map[string]bool
	unsaid  []error

	mu     sync.Mutex
	byPath map[string]*directory // of the route: what events count
	single bool                  // whether the route ends in one file
	seen   change
}

func newObserver(path string, open func() (*fsnotify.Watcher, error)) *observer {
	return &observer{
		path: path, open: open,
		wake:  make(chan struct{}, 1),
		armed: map[string]identity{},
		said:  map[string]bool{},
	}
}

// close ends the observer's goroutines and gives back what they hold.
func (o *observer) close() {
	if o.inotify != nil {
		o.inotify.Close() // always nil on Linux once the descriptor is closed
	}
	if o.mounts != nil {
		o.mounts.Close()
	}
	o.pumps.Wait()
}

// arm renews the watches and returns what the path leads to, and what there is
// to say for the first time. From then on no change goes unnoticed, unless
// stable is false: then the path changed faster than it could be followed, and
// arm must soon be called again.
func (o *observer) arm() (s sight, stable bool, warnings []error) {
	o.start()
	r := resolve(o.path)
	for range 4 {
		stable = o.watch(r)
		// A change before the watch was there made no event.
		before := r
		r = resolve(o.path)
		if stable = stable && r.same(before); stable {
			break
		}
	}
	for _, path := range r.mounted {
		o.say("mount "+path, fmt.Errorf("%q: mounted as a single file (a subPath or file bind mount): "+
			"it goes on showing the old file when the source is replaced; mount its directory instead", path))
	}
	warnings, o.unsaid = o.unsaid, nil
	return r.sight, stable, warnings
}

// start makes the sources of events, or tries again to.
func (o *observer) start() {
	if o.inotify == nil {
		w, err := o.open()
		if err != nil {
			o.complain(err)
		} else {
			o.inotify = w
			o.pumps.Go(func() { o.pump(w) })
		}
	}
	if o.mounts == nil {
		// Without /proc there is nothing to say: Look finds mounts too.
		if f, err := os.Open("/proc/self/mountinfo"); err == nil {
			o.mounts = f
			o.pumps.Go(func() { o.pumpMounts(f) })
		}
	}
}

// watch makes the watches those of r and reports whether all directories of r
// were still there.
func (o *observer) watch(r *route) bool {
	o.filter(r)
	if o.inotify == nil {
		return true
	}
	wanted := map[string]identity{}
	for _, d := range r.dirs {
		wanted[d.path] = d.id
	}
	for path, id := range o.armed {
		if wanted[path] != id {
			o.disarm(path)
		}
	}
	all := true
	for _, d := range r.dirs {
		// Again each time, as only the kernel knows whether the watch is still
		// there: the inode may be a new one with an old number, the file system
		// have been unmounted and mounted again.
		err := o.inotify.Add(d.path)
		switch {
		case err == nil:
			o.armed[d.path] = d.id
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			all = false // it is no longer what it was
		default:
			o.complain(fmt.Errorf("%q: %w", d.path, err))
		}
	}
	return all
}

// disarm gives up the watch of a directory, which may have died already.
func (o *observer) disarm(path string) {
	delete(o.armed, path)
	// Remove of fsnotify 1.10.1 panics for a path that has lost its watch: when
	// it was added again it led to a directory watched by another path.
	defer func() { _ = recover() }()
	_ = o.inotify.Remove(path)
}

func (o *observer) filter(r *route) {
	byPath := map[string]*directory{}
	single := true
	for _, d := range r.dirs {
		byPath[d.path] = d
		single = single && !d.all
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.byPath, o.single = byPath, single
}

// complain says once for each cause that inotify does not do.
func (o *observer) complain(err error) {
	var errno unix.Errno
	errors.As(err, &errno)
	hint := ""
	switch errno {
	case unix.EMFILE:
		hint = " (fs.inotify.max_user_instances, or the limit of open files)"
	case unix.ENOSPC:
		hint = " (fs.inotify.max_user_watches)"
	}
	o.say("inotify "+errno.Error(), fmt.Errorf("inotify: %w%s: some changes are found by polling only", err, hint))
}

func (o *observer) say(key string, err error) {
	if !o.said[key] {
		o.said[key] = true
		o.unsaid = append(o.unsaid, err)
	}
}

// pump reads everything at once, so that the kernel's queue does not run over
// while content is read, and errors too: fsnotify holds its lock while it
// sends some.
func (o *observer) pump(w *fsnotify.Watcher) {
	events, errs := w.Events, w.Errors
	for events != nil || errs != nil {
		select {
		case e, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			o.note(o.classify(e))
		case _, ok := <-errs:
			if !ok {
				errs = nil
				continue
			}
			o.note(asked) // the queue ran over: anything may have happened
		}
	}
}

// pumpMounts waits for changes of the mount table. The kernel wakes who polls
// the file (proc_pid_mountinfo(5)); the callback's false means: wait.
func (o *observer) pumpMounts(f *os.File) {
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	first := true
	_ = conn.Read(func(uintptr) bool { // ends with an error when f is closed
		if !first { // that is before any waiting
			o.note(asked)
		}
		first = false
		return false
	})
}

// classify says what an event means for the path; zero for nothing.
func (o *observer) classify(e fsnotify.Event) change {
	o.mu.Lock()
	defer o.mu.Unlock()
	if d, ok := o.byPath[filepath.Dir(e.Name)]; ok {
		if as, ok := d.names[filepath.Base(e.Name)]; ok || d.all {
			return as.change(e.Op)
		}
	}
	// A watched directory's own end; usually its parent's event says so first.
	if _, ok := o.byPath[e.Name]; ok && e.Op&(fsnotify.Remove|fsnotify.Rename) != 0 {
		return removed
	}
	return 0
}

// change is what an operation on a name means. A name that was not on the
// route (zero) can only become a file of a directory that is followed.
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
		return asked
	}
}

// note adds to what has happened and wakes who waits for it.
func (o *observer) note(c change) {
	if c == 0 {
		return
	}
	o.mu.Lock()
	o.seen = o.seen.then(c, o.single)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// peek returns what has happened since the last take.
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
