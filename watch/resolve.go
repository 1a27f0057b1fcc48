package watch

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxLinks is the number of links beyond which the kernel fails with ELOOP
// (path_resolution(7)).
const maxLinks = 40

// An identity identifies an inode. If the file system records birth times, it
// also distinguishes a later inode with the same number.
type identity struct {
	major, minor uint32
	inode        uint64
	birth        unix.StatxTimestamp
}

// A step is what a file system is asked for: a name in a directory, or "", the
// directory itself. A dead mount never responds.
type step struct {
	dir  identity
	name string
}

// A role is the meaning of a directory entry for the path.
type role uint8

const (
	passage role = iota + 1 // a directory or link on the way
	end                     // the file, or the first missing name
)

// A directory is on the route of a path, at these names or (all) at every one.
type directory struct {
	path  string // without symbolic links
	id    identity
	names map[string]role
	all   bool
}

// A route is everything that determines what a path leads to at one moment.
type route struct {
	dirs     []*directory // in route order: parents first
	byPath   map[string]*directory
	snapshot snapshot
	single   bool     // it ends in one file
	mounted  []string // files that are mount points
	ask      func(step) bool
	blocked  bool // incomplete, because ask did not allow a step
}

// resolve walks the path as the kernel does and records the directories on the
// way. If the path leads to a directory, every entry is followed too. Before each
// step it calls ask.
func resolve(path string, ask func(step) bool) *route {
	r := &route{byPath: map[string]*directory{}, snapshot: snapshot{}, ask: ask}
	start := "."
	if filepath.IsAbs(path) {
		start = "/"
	}
	dir, found := r.walk(start, split(path))
	if dir == "" {
		r.snapshot[path], r.single = found, true
		return r
	}
	d := r.pass(dir)
	if d == nil {
		return r
	}
	d.all = true
	if !r.allowed(step{d.id, ""}) {
		return r
	}
	for _, name := range entryNames(dir) {
		if sub, found := r.walk(dir, []string{name}); sub == "" {
			r.snapshot[filepath.Join(path, name)] = found
		}
	}
	return r
}

func (r *route) allowed(s step) bool {
	r.blocked = r.blocked || !r.ask(s)
	return !r.blocked
}

// maxEntries bounds the directory entries that are followed: each event makes the
// caller read all of them.
const maxEntries = 1000

// entryNames returns the names in a directory, none if it cannot be read.
func entryNames(dir string) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	names, _ := f.Readdirnames(maxEntries)
	slices.Sort(names)
	return names
}

// walk follows rest from the directory start, a path without symbolic links. If
// it ends in a directory, walk returns its path, otherwise what it found there.
func (r *route) walk(start string, rest []string) (dir string, found target) {
	dir = start
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		if name == ".." {
			dir = filepath.Join(dir, name)
			continue
		}
		full := filepath.Join(dir, name)
		in := r.pass(dir)
		if in == nil || !r.allowed(step{in.id, name}) {
			return "", found
		}
		st, err := stat(full)
		switch {
		case err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK:
			in.at(name, passage)
			to, err := os.Readlink(full)
			if links++; err != nil || links > maxLinks {
				return "", found
			}
			found.links += full + "\x00" + to + "\x00"
			rest = append(split(to), rest...)
			if filepath.IsAbs(to) {
				dir = "/"
			}
		case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
			in.at(name, passage)
			dir = full
		case len(rest) > 0: // it does not exist, or is a file instead of a directory
			in.at(name, passage)
			return "", found
		default:
			in.at(name, end)
			if err == nil {
				r.reach(full, st, &found)
			}
			return "", found
		}
	}
	return dir, found
}

// reach records the file at the end. A mount point (reported since Linux 5.8) is
// also watched itself: writes to it are events of the directory it was mounted
// from.
func (r *route) reach(path string, st unix.Statx_t, t *target) {
	t.exists, t.id, t.size = true, identify(st), st.Size
	t.mtime = time.Unix(st.Mtime.Sec, int64(st.Mtime.Nsec))
	if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		r.mounted = append(r.mounted, path)
		r.pass(path)
	}
}

// pass returns the route's entry for a directory, creating it if needed, or nil
// if the directory does not exist. Two paths to one inode, because of a bind
// mount, share the entry, because inotify has one watch for both.
func (r *route) pass(path string) *directory {
	if d, ok := r.byPath[path]; ok {
		return d
	}
	st, err := stat(path)
	if err != nil {
		return nil
	}
	id := identify(st)
	i := slices.IndexFunc(r.dirs, func(d *directory) bool { return d.id == id })
	if i < 0 {
		i = len(r.dirs)
		r.dirs = append(r.dirs, &directory{path: path, id: id, names: map[string]role{}})
	}
	r.byPath[path] = r.dirs[i]
	return r.dirs[i]
}

func (d *directory) at(name string, as role) { d.names[name] = max(d.names[name], as) }

func split(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(s string) bool { return s == "" || s == "." })
}

// stat does not ask for attributes that the kernel knows, so that it names the root
// of a dead mount.
func stat(path string) (st unix.Statx_t, err error) {
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	for {
		err = unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
		if err != unix.EINTR {
			return st, err
		}
	}
}

func identify(st unix.Statx_t) identity {
	return identity{st.Dev_major, st.Dev_minor, st.Ino, st.Btime}
}
