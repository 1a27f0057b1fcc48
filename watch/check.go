package watch

import (
	"maps"
	"os"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// An observer checks a path, one check at a time.
type checker struct {
	path     string
	read     func() (deliver func(), fingerprint string, present int)
	inotify  *fsnotify.Watcher     // nil if it could not be opened
	events   <-chan fsnotify.Event // of inotify
	requests chan struct{}         // to read the content
}

func (o *checker) reread() {
	select {
	case o.requests <- struct{}{}:
	default:
	}
}

// A reading is what a path leads to, and the content.
type reading struct {
	files   files
	id      string // of the content, "" if it was not read
	present int    // how many files there are with something in them, or unknown
}

// unknown is for an error that does not tell how many files there are.
const unknown = -1

// files are the file at a path or, if that is a directory, the files in it, by the path
// to each.
type files map[string]file

// A file is equal to another one if nothing about it has changed.
type file struct {
	path string       // without symbolic links; "" if its directory does not exist
	stat unix.Statx_t // zero if it does not exist
}

// check finds out what the path leads to, makes inotify watch it, and reads the content
// if read is true or the files differ from the known ones. Every later change causes an
// event, unless inotify does not report it.
func (o *checker) check(read bool, known files) (r reading, deliver func()) {
	r.files = o.resolve()
	o.watch(r.files)
	if read || !maps.Equal(r.files, known) {
		deliver, r.id, r.present = o.read()
	}
	return r, deliver
}

// maxEntries limits the entries of a directory that are followed.
const maxEntries = 1000

func (o *checker) resolve() files {
	paths := []string{o.path}
	if dir, err := os.OpenFile(o.path, unix.O_DIRECTORY, 0); err == nil {
		paths, _ = dir.Readdirnames(maxEntries)
		for i, name := range paths {
			paths[i] = o.path + "/" + name
		}
		dir.Close()
	}
	found := files{}
	for _, path := range paths {
		f := fileAt(path)
		if f.stat.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		found[path] = f
	}
	return found
}

func fileAt(path string) (f file) {
	end, err := filepath.EvalSymlinks(path)
	if err != nil {
		dir, name := filepath.Split(path)
		dir, err = filepath.EvalSymlinks(dir)
		if err == nil {
			f.path = filepath.Join(dir, name)
		}
		return f
	}
	f.path = end
	if unix.Statx(unix.AT_FDCWD, end, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &f.stat) == nil {
		f.stat.Atime = unix.StatxTimestamp{} // reading changes it
	}
	return f
}

// watch makes inotify watch the path, its directory, and those of the files, as far as they exist and the
// kernel's limits (fs.inotify.*) allow: the next check tries again. A watch
// belongs to an inode and vanishes with it, so each check adds all of them. Watches of
// other directories remain until there are too many.
func (o *checker) watch(found files) {
	const (
		limit     = 2 * maxEntries
		unhandled = 100 // events; the kernel queues more
	)
	if o.inotify != nil && len(o.inotify.WatchList()) > limit {
		o.close()
	}
	if o.inotify == nil {
		var err error
		o.inotify, err = fsnotify.NewBufferedWatcher(unhandled)
		if err != nil {
			return
		}
		o.events = o.inotify.Events
		failures := o.inotify.Errors
		go func() {
			// Received at once, because fsnotify keeps its lock while it sends some.
			for range failures {
				o.reread() // events were lost
			}
		}()
	}
	paths := map[string]bool{fileAt(o.path).path: true, fileAt(filepath.Dir(o.path)).path: true}
	for _, f := range found {
		if f.path != "" {
			paths[filepath.Dir(f.path)] = true
		}
	}
	delete(paths, "")
	for path := range paths {
		_ = o.inotify.Add(path)
	}
}

func (o *checker) close() {
	if o.inotify != nil {
		o.inotify.Close() // always nil on Linux once the descriptor is closed
		o.inotify = nil
		o.events = nil
	}
}
