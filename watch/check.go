package watch

import (
	"maps"
	"os"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// A checker checks a path, one check at a time.
type checker struct {
	path     string
	read     func() (deliver func(), fingerprint string, present int)
	inotify  *fsnotify.Watcher     // nil if it could not be opened
	events   <-chan fsnotify.Event // of inotify
	requests chan struct{}         // to read the content
}

func (c *checker) reread() {
	select {
	case c.requests <- struct{}{}:
	default:
	}
}

// A reading is the result of a check: the files to which a path leads and, if they were read, their content.
type reading struct {
	files   files
	id      string // of the content, "" if it was not read
	present int    // the number of files with something in them, or unknown
}

// unknown is the number of files if they cannot be read.
const unknown = -1

// files are the file at a path or, if that is a directory, the files in it, each by its path.
type files map[string]file

// A file is the state of one file: that has changed if the two values are not equal.
type file struct {
	path string       // without symbolic links; "" if its directory does not exist
	stat unix.Statx_t // zero if it does not exist
}

// check finds out to which files the path leads, makes inotify watch them, and reads the content if force is set or the
// files differ from the known ones. Every later change causes an event, unless inotify does not report it.
func (c *checker) check(force bool, known files) (r reading, deliver func()) {
	r.files = c.resolve()
	c.watch(r.files)
	if force || !maps.Equal(r.files, known) {
		deliver, r.id, r.present = c.read()
	}
	return r, deliver
}

// maxEntries is how many entries of a directory are followed.
const maxEntries = 1000

func (c *checker) resolve() files {
	paths := []string{c.path}
	if dir, err := os.OpenFile(c.path, unix.O_DIRECTORY, 0); err == nil {
		paths, _ = dir.Readdirnames(maxEntries)
		for i, name := range paths {
			paths[i] = c.path + "/" + name
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
func (c *checker) watch(found files) {
	const (
		limit     = 2 * maxEntries
		unhandled = 100 // events; the kernel queues more
	)
	if c.inotify != nil && len(c.inotify.WatchList()) > limit {
		c.close()
	}
	if c.inotify == nil {
		var err error
		c.inotify, err = fsnotify.NewBufferedWatcher(unhandled)
		if err != nil {
			return
		}
		c.events = c.inotify.Events
		failures := c.inotify.Errors
		go func() {
			// Received at once, because fsnotify keeps its lock while it sends some.
			for range failures {
				c.reread() // events were lost
			}
		}()
	}
	paths := map[string]bool{fileAt(c.path).path: true, fileAt(filepath.Dir(c.path)).path: true}
	for _, f := range found {
		if f.path != "" {
			paths[filepath.Dir(f.path)] = true
		}
	}
	delete(paths, "")
	for path := range paths {
		_ = c.inotify.Add(path)
	}
}

func (c *checker) close() {
	if c.inotify != nil {
		c.inotify.Close() // always nil on Linux once the descriptor is closed
		c.inotify = nil
		c.events = nil
	}
}
