package watch

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A volume is a directory that is updated as the kubelet does.
type volume struct {
	dir    string
	count  int
	turned time.Time
}

// swap writes a new set of files, switches "..data" to it and removes the old one.
func (v *volume) swap(t testing.TB, content string) {
	t.Helper()
	v.turnTo(t, content)
	check(t, os.RemoveAll(v.join(fmt.Sprintf("..%d", v.count-1))))
}

func (v *volume) turnTo(t testing.TB, content string) {
	t.Helper()
	v.count++
	next := fmt.Sprintf("..%d", v.count)
	check(t, os.Mkdir(v.join(next), 0o755))
	check(t, os.WriteFile(v.join(next, "file"), []byte(content), 0o644))
	check(t, os.Symlink(next, v.join("..data_tmp")))
	v.turned = time.Now()
	check(t, os.Rename(v.join("..data_tmp"), v.join("..data")))
}

func (v *volume) join(names ...string) string {
	return filepath.Join(append([]string{v.dir}, names...)...)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newVolume(t testing.TB, content string) *volume {
	v := &volume{dir: t.TempDir()}
	v.turnTo(t, content)
	check(t, os.Symlink("..data/file", v.join("file")))
	return v
}

func TestSwapsLeakNothing(t *testing.T) {
	v := newVolume(t, "0")
	path := v.join("file")
	check(t, warmUp(t, path)) // the runtime's poller keeps descriptors
	goroutines, descriptors := runtime.NumGoroutine(), len(links(t, "/proc/self/fd"))

	ctx, stop := context.WithCancel(t.Context())
	w := Start(ctx, path, reader(path))
	want := func(content string) {
		t.Helper()
		if got := <-w.Content(); got != content {
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
		v.swap(t, fmt.Sprint(i+1))
		want(fmt.Sprint(i + 1))
	}
	// The watch of the last set's directory is gone by now, or will be at the
	// next poll.
	if got := inotifyWatches(t); got > watches+1 {
		t.Errorf("%d inotify watches after %d swaps, %d before", got, swaps, watches)
	}
	stop()
	<-w.Done()
	if got := len(links(t, "/proc/self/fd")); got != descriptors {
		t.Errorf("%d file descriptors after, %d before:\n%s", got, descriptors,
			strings.Join(links(t, "/proc/self/fd"), "\n"))
	}
	if !settles(func() bool { return runtime.NumGoroutine() <= goroutines }) {
		t.Errorf("%d goroutines after, %d before", runtime.NumGoroutine(), goroutines)
	}
}

func warmUp(t *testing.T, path string) error {
	ctx, stop := context.WithCancel(t.Context())
	w := Start(ctx, path, reader(path))
	<-w.Content()
	stop()
	<-w.Done()
	return nil
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
		f, err := os.Open(file)
		if err != nil {
			continue // Glob's own descriptor
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "inotify ") {
				count++
			}
		}
		f.Close()
	}
	return count
}

// In a busy directory on the way, only the names on the path matter.
func TestUnrelatedNamesAreIgnored(t *testing.T) {
	s := newScript(t)
	check(t, os.MkdirAll(s.path("/tmp/config"), 0o755))
	o := newObserver(s.path("/tmp/config/file"), fsnotify.NewWatcher)
	defer o.close()
	if a := o.arm(); !a.stable || len(a.warnings) > 0 {
		t.Fatal("not armed: ", a.warnings)
	}
	for _, tt := range []struct {
		name string
		op   fsnotify.Op
		want change
	}{
		{"/tmp/other", fsnotify.Create, 0},
		{"/tmp/other", fsnotify.Write, 0},
		{"/tmp/other", fsnotify.Remove, 0},
		{"/tmp/file", fsnotify.Write, 0},
		{"/tmp/config/other", fsnotify.Rename, 0},
		{"/tmp/config/file", fsnotify.Create, created},
		{"/tmp/config/file", fsnotify.Write, written},
		{"/tmp/config/file", fsnotify.Rename, removed},
		{"/tmp/config/file", fsnotify.Chmod, polled},
		{"/tmp/config", fsnotify.Create, swapped},
		{"/tmp/config", fsnotify.Remove, removed},
		{"/tmp", fsnotify.Chmod, polled},
	} {
		if got := o.classify(fsnotify.Event{Name: s.path(tt.name), Op: tt.op}); got != tt.want {
			t.Errorf("%s %s: change %b, want %b", tt.op, tt.name, got, tt.want)
		}
	}
}

// TestLosingAWatchDoesNotPanic creates the state in which Remove of fsnotify
// 1.10.1 panics.
func TestLosingAWatchDoesNotPanic(t *testing.T) {
	s := newScript(t)
	o := newObserver(s.path("/file"), fsnotify.NewWatcher)
	defer o.close()
	o.arm()
	for _, dir := range []string{"/a/dir", "/b"} {
		check(t, os.MkdirAll(s.path(dir), 0o755))
		check(t, o.inotify.Add(s.path(dir)))
	}
	check(t, os.Rename(s.path("/a"), s.path("/c")))
	check(t, os.Mkdir(s.path("/a"), 0o755))
	check(t, os.Symlink(s.path("/b"), s.path("/a/dir")))
	check(t, o.inotify.Add(s.path("/a/dir")))
	o.disarm(s.path("/a/dir"))
}

func TestRelativePathIsFollowed(t *testing.T) {
	s := newScript(t)
	check(t, os.MkdirAll(s.path("/work"), 0o755))
	t.Chdir(s.path("/work"))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for _, path := range []string{"file", "./dir/../file", "../file", "../work/file"} {
		w := start(ctx, s.timing, newObserver(path, fsnotify.NewWatcher), reader(path))
		for _, content := range []string{"nothing", "one", "nothing"} {
			switch content {
			case "one":
				check(t, os.MkdirAll("dir", 0o755))
				check(t, os.WriteFile("new", []byte(content), 0o644))
				check(t, os.Rename("new", path))
			case "nothing":
				check(t, os.RemoveAll(path))
			}
			if got := <-w.Content(); got != content {
				t.Errorf("%s: got %q, want %q", path, got, content)
			}
		}
	}
}

// BenchmarkSwap measures from the rename of "..data" to the content.
func BenchmarkSwap(b *testing.B) {
	v := newVolume(b, "")
	path := v.join("file")
	w := Start(b.Context(), path, reader(path))
	<-w.Content()
	var took []time.Duration
	for b.Loop() {
		check(b, os.RemoveAll(v.join(fmt.Sprintf("..%d", v.count-1))))
		v.turnTo(b, fmt.Sprint(v.count))
		<-w.Content()
		took = append(took, time.Since(v.turned))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs/median")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs/p99")
}
