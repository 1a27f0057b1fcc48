package watch

import (
	"maps"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A settler decides, reading by reading, whether content is complete. It does no I/O and has no clock.
type settler struct {
	quiet      time.Duration // how long content must be the same, unless its files arrived complete
	fewerFiles time.Duration // how long it must be the same if there are fewer files than before
	settled    reading       // the last complete one; without id for none
	reported   fsnotify.Op   // what inotify reported first about the settled files since: Create, Remove or Rename

	pending      string    // id of content that is not complete yet, "" for none
	pendingSince time.Time // when the pending content was first read
	firstBy      time.Time // when the first content counts as complete in any case
}

// step handles a reading, which was made from begin to end. It returns whether its content is to be delivered, because
// it is complete and new, and when content that is not complete is to be read again.
func (s *settler) step(begin, end time.Time, r reading) (deliver bool, retry time.Time) {
	const longest = 500 * time.Millisecond
	if s.firstBy.IsZero() {
		s.firstBy = end.Add(longest)
	}
	if r.id != s.pending {
		s.pending = r.id
		s.pendingSince = end
	}
	complete := s.arrived(r, begin)
	quiet := s.quiet
	if s.isGap(r, complete) {
		complete = false
		quiet = s.fewerFiles
	}
	retry = s.pendingSince.Add(quiet)
	if s.settled.id == "" && s.firstBy.Before(retry) {
		retry = s.firstBy
	}
	isNew := r.id != s.settled.id
	if isNew && begin.Before(retry) && !complete {
		return false, retry
	}
	if r.present == unknown {
		r.present = s.settled.present
	}
	s.settled = r
	s.pending = ""
	s.reported = 0
	return isNew, retry
}

// isGap reports whether files are missing that may be back in a moment, because many programs remove or truncate a file
// and then write it. A switched link that leaves some of the files is no gap, but an intended change. The first content
// is never one.
func (s *settler) isGap(r reading, complete bool) bool {
	if r.present == unknown || r.present >= s.settled.present {
		return false
	}
	return r.present == 0 || !complete
}

// arrived reports whether the files differ from the settled ones, and each that does was complete when it appeared, so
// that there is nothing to wait for. Files may have vanished only if a link was switched at the same time.
func (s *settler) arrived(r reading, t time.Time) bool {
	switched := false
	for path, f := range r.files {
		previous := s.settled.files[path]
		if f == previous || f.stat.Ino == 0 {
			continue
		}
		if !s.complete(filepath.Clean(path), previous, f, t) {
			return false
		}
		switched = switched || isSwitched(filepath.Clean(path), previous, f)
	}
	for path, previous := range s.settled.files {
		if previous.stat.Ino != 0 && r.files[path].stat.Ino == 0 && !switched {
			return false
		}
	}
	return !maps.Equal(r.files, s.settled.files)
}

// isSwitched reports whether a link on the way to a file was switched.
func isSwitched(path string, previous, current file) bool {
	return current.path != path && current.path != previous.path && previous.path != ""
}

// complete reports whether a file was complete when it replaced the one before.
func (s *settler) complete(path string, previous, current file, t time.Time) bool {
	switch {
	case current.stat.Ino == previous.stat.Ino:
		return false // it was written in place
	case isSwitched(path, previous, current):
		return true
	case previous.stat.Ino != 0 && s.reported == fsnotify.Create:
		return true // the name was never missing, so this was a rename
	default:
		modified := time.Unix(current.stat.Mtime.Sec, int64(current.stat.Mtime.Nsec))
		return t.Sub(modified) >= s.quiet // moved here, and not written recently
	}
}
