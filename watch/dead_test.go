package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// deadMount mounts a file system that never answers, until revived.
func deadMount(t *testing.T) (dir string, revive func()) {
	t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())
	if err := unix.Mount("dead", dir, "fuse", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		fuse.Close() // ends the blocked calls
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	return dir, func() {
		if err := errors.Join(unix.Unmount(dir, unix.MNT_DETACH), fuse.Close()); err != nil {
			t.Error(err)
		}
	}
}

func TestDeadMountBlocksNeitherContentNorShutdown(t *testing.T) {
	dir, _ := deadMount(t)
	ctx, cancel := context.WithCancel(context.Background())
	impatient := defaultTiming()
	if testing.Short() {
		impatient.arm /= 10
	}
	w := start(ctx, impatient, newObserver(filepath.Join(dir, "config"), fsnotify.NewWatcher), func() (string, string) { return "blocked", "blocked" })
	if got := <-w.Content(); got != "blocked" {
		t.Errorf("content %q", got)
	}
	cancel()
	<-w.Done()
}

func TestWatchesAreRenewedAfterDeadMountIsGone(t *testing.T) {
	dir, revive := deadMount(t)
	calls := 0
	a := armer{limit: time.Millisecond, arm: func() (snapshot, bool, []error) {
		calls++
		return resolve(filepath.Join(dir, "config")).snapshot, true, nil
	}}
	for range 10 {
		if seen, _, _ := a.try(); seen != nil {
			t.Fatalf("got %v", seen)
		}
	}
	revive()
	r := <-a.pending // the only call returns
	a.pending = nil
	if calls != 1 {
		t.Errorf("%d calls, the last got %v", calls, r.seen)
	}
	a.limit = time.Minute
	if seen, _, _ := a.try(); seen == nil {
		t.Error("no snapshot")
	}
}
