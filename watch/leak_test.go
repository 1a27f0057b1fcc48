package watch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest/agent"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestSwapsLeakNothing(t *testing.T) {
	v := agent.NewVolume(t.TempDir())
	check(t, v.Write([]byte("0")))
	path := v.Path()
	warmUp(t, path) // the runtime's poller keeps descriptors
	goroutines, descriptors := runtime.NumGoroutine(), len(links(t, "/proc/self/fd"))

	ctx, stop := context.WithCancel(t.Context())
	w := start(ctx, unpaced(), path)
	want := func(content string) {
		t.Helper()
		if got := <-w.content; got != content {
			t.Fatalf("got %q, want %q", got, content)
		}
	}
	want("0")
	watches := inotifyWatches(t)
	if watches == 0 {
		t.Fatal("no inotify watches found in /proc/self/fdinfo")
	}
	swaps := 1000
	if testing.Short() {
		swaps = 100
	}
	for i := range swaps {
		check(t, v.Write(fmt.Append(nil, i+1)))
		want(fmt.Sprint(i + 1))
	}
	// The watch of the last set's directory is gone by now, or will be at the
	// next poll.
	if got := inotifyWatches(t); got > watches+1 {
		t.Errorf("%d inotify watches after %d swaps, %d before", got, swaps, watches)
	}
	stop()
	<-w.ended
	if got := len(links(t, "/proc/self/fd")); got != descriptors {
		t.Errorf("%d file descriptors after, %d before:\n%s", got, descriptors,
			strings.Join(links(t, "/proc/self/fd"), "\n"))
	}
	if !settles(func() bool { return runtime.NumGoroutine() <= goroutines }) {
		t.Errorf("%d goroutines after, %d before", runtime.NumGoroutine(), goroutines)
	}
}

func warmUp(t *testing.T, path string) {
	ctx, stop := context.WithCancel(t.Context())
	w := start(ctx, unpaced(), path)
	<-w.content
	stop()
	<-w.ended
}

// unpaced is without the limit of processor time.
func unpaced() timing {
	return timing{poll: time.Second, quiet: 50 * time.Millisecond}
}

// settles waits for a condition that is about to become true: a goroutine still
// counts for a moment after its last statement.
func settles(ok func() bool) bool {
	for range 1000 {
		if ok() {
			return true
		}
		time.Sleep(time.Millisecond)
	}
	return false
}

func links(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	for _, entry := range entries {
		if to, err := os.Readlink(filepath.Join(dir, entry.Name())); err == nil {
			all = append(all, to)
		}
	}
	return all
}

// inotifyWatches counts the kernel's watches of this process.
func inotifyWatches(t *testing.T) (count int) {
	t.Helper()
	files, err := filepath.Glob("/proc/self/fdinfo/*")
	check(t, err)
	for _, file := range files {
		text, _ := os.ReadFile(file) // Glob's own descriptor is closed
		count += strings.Count(string(text), "inotify wd:")
	}
	return count
}

func TestChecksWithoutAChangeReadNothingAndLeakNothing(t *testing.T) {
	s := newPlayer(t)
	for _, line := range []string{"mkdir /config", "write /config/a one", "write /config/b two"} {
		args := strings.Fields(line)
		check(t, commands[args[0]](s, args[1:]))
	}
	for _, path := range []string{"/config", "/config/a"} {
		o := newChecker(s.path(path), reader(s.path(path)), make(chan string, 1))
		defer o.close()
		first, _ := o.check(true, nil) // it changes the time of the last access
		before := len(links(t, "/proc/self/fd"))
		for range 50 {
			if again, _ := o.check(false, first.files); again.id != "" {
				t.Fatalf("%s: read again", path)
			}
		}
		if now := len(links(t, "/proc/self/fd")); now > before {
			t.Errorf("%s: %d file descriptors, were %d", path, now, before)
		}
	}
}

// A link that is switched between directories that stay must not use up the watches
// that all processes of the user share.
func TestWatchesOfOldDirectoriesAreBounded(t *testing.T) {
	s := newPlayer(t)
	o := newChecker(s.path("/link/file"), reader(s.path("/link/file")), make(chan string, 1))
	defer o.close()
	most, before := 0, inotifyWatches(t)
	for i := range 2 * maxEntries {
		check(t, os.MkdirAll(s.path(fmt.Sprintf("/%d", i)), 0o755))
		check(t, os.Symlink(fmt.Sprint(i), s.path("/new")))
		check(t, os.Rename(s.path("/new"), s.path("/link")))
		o.check(false, nil)
		if i%100 == 99 {
			most = max(most, inotifyWatches(t)-before)
		}
	}
	if most < maxEntries || most > 2*maxEntries+3 {
		t.Errorf("at most %d watches", most)
	}
}

func TestFollowDeliversContent(t *testing.T) {
	s := newPlayer(t)
	for _, line := range []string{"write /source one", "write /file", "bind /source /file"} {
		args := strings.Fields(line)
		check(t, commands[args[0]](s, args[1:]))
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	reads := make(chan struct{}, 100)
	content, reread := Follow(ctx, s.path("/file"), func() (string, string, int) {
		reads <- struct{}{}
		return reader(s.path("/file"))()
	})
	if got := <-content; got != "one" {
		t.Errorf("delivered %q, want %q of the mounted file", got, "one")
	}
	check(t, os.WriteFile(s.path("/source"), []byte("two"), 0o644))
	if got := <-content; got != "two" {
		t.Errorf("delivered %q, want %q, which was written into the mount's source", got, "two")
	}
	for len(reads) > 0 {
		<-reads
	}
	reread()
	<-reads
}
