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
	again = s.since.Add(s.quiet)
	if s.settled.id == "" && s.limit.Before(again) {
		again = s.limit
	}
	settled = r.id != s.settled.id
	if settled && begin.Before(again) && !s.arrived(r, begin) {
		return false, again
	}
	s.settled, s.pending, s.reported = r, "", 0
	return settled, again
}

// arrived reports whether the files differ from the settled ones, and each that does
// was complete when it appeared, so that there is nothing to wait for.
func (s *settler) arrived(r reading, t time.Time) bool {
	for path := range s.settled.files {
		if _, ok := r.files[path]; !ok {
			return false
		}
	}
	for path, f := range r.files {
		if before := s.settled.files[path]; f != before && !s.complete(filepath.Clean(path), before, f, t) {
			return false
		}
	}
	return !maps.Equal(r.files, s.settled.files)
}

// complete reports whether a file was complete when it replaced the one before.
func (s *settler) complete(path string, before, now file, t time.Time) bool {
	switch {
	case now.stat.Ino == before.stat.Ino:
		return now.stat.Ino == 0 // otherwise it was written in place
	case now.stat.Ino == 0:
		return false // it vanished
	case now.path != path && now.path != before.path && before.path != "":
		return true // a link was switched
	case before.stat.Ino != 0 && s.reported == fsnotify.Create:
		return true // the name was never missing, so this was a rename
	default:
		modified := time.Unix(now.stat.Mtime.Sec, int64(now.stat.Mtime.Nsec))
		return t.Sub(modified) >= s.quiet // moved here, and not written recently
	}
}
