package watch

import (
	"maps"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A settler decides, reading by reading, whether content is complete. It does no I/O
// and has no clock.
type settler struct {
	quiet    time.Duration // how long content must be the same, unless its files arrived complete
	gap      time.Duration // how long that must be if there are fewer files than before
	settled  reading       // the last complete one; without id for none
	reported fsnotify.Op   // what inotify reported first about its files since: Create, Remove or Rename

	pending string    // id of content that is not complete yet, "" for none
	since   time.Time // when that was first read
	limit   time.Time // when the first content counts as complete in any case
}

// step handles a reading, which may have taken time. It returns whether it is complete
// and new, and when content that is not complete is to be read again.
func (s *settler) step(begin, end time.Time, r reading) (settled bool, again time.Time) {
	const longest = 500 * time.Millisecond
	if s.limit.IsZero() {
		s.limit = end.Add(longest)
	}
	if r.id != s.pending {
		s.pending, s.since = r.id, end
	}
	complete := s.arrived(r, begin)
	quiet := s.quiet
	if s.isGap(r, complete) {
		complete = false
		quiet = s.gap
	}
	again = s.since.Add(quiet)
	if s.settled.id == "" && s.limit.Before(again) {
		again = s.limit
	}
	settled = r.id != s.settled.id
	if settled && begin.Before(again) && !complete {
		return false, again
	}
	if r.present == unknown {
		r.present = s.settled.present
	}
	s.settled, s.pending, s.reported = r, "", 0
	return settled, again
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
		before := s.settled.files[path]
		if f == before || f.stat.Ino == 0 {
			continue
		}
		if !s.complete(filepath.Clean(path), before, f, t) {
			return false
		}
		switched = switched || isSwitched(filepath.Clean(path), before, f)
	}
	for path, before := range s.settled.files {
		if before.stat.Ino != 0 && r.files[path].stat.Ino == 0 && !switched {
			return false
		}
	}
	return !maps.Equal(r.files, s.settled.files)
}

// isSwitched reports whether a link on the way to a file was switched.
func isSwitched(path string, before, now file) bool {
	return now.path != path && now.path != before.path && before.path != ""
}

// complete reports whether a file was complete when it replaced the one before.
func (s *settler) complete(path string, before, now file, t time.Time) bool {
	switch {
	case now.stat.Ino == before.stat.Ino:
		return false // it was written in place
	case isSwitched(path, before, now):
		return true
	case before.stat.Ino != 0 && s.reported == fsnotify.Create:
		return true // the name was never missing, so this was a rename
	default:
		modified := time.Unix(now.stat.Mtime.Sec, int64(now.stat.Mtime.Nsec))
		return t.Sub(modified) >= s.quiet // moved here, and not written recently
	}
}
