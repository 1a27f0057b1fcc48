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

// deadMount mounts a file system that never responds. From fail on, every call of
// it returns an error.
func deadMount(t *testing.T) (dir string, fail func()) {
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
		fuse.Close()
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	return dir, func() { check(t, fuse.Close()) }
}

func TestDeadMountBlocksNeitherContentNorShutdown(t *testing.T) {
	dir, _ := deadMount(t)
	ctx, cancel := context.WithCancel(context.Background())
	impatient := defaultTiming()
	if testing.Short() {
		impatient.arm /= 10
	}
	w := start(ctx, impatient, newObserver(filepath.Join(dir, "config"), fsnotify.NewWatcher), func(place string) (string, string) { return "at " + place, place })
	if got := <-w.Content(); got != "at " {
		t.Errorf("content %q", got)
	}
	cancel()
	<-w.Done()
}

func TestPathIsFollowedAfterItLeavesADeadMount(t *testing.T) {
	for name, leave := range map[string]func(dir, dead string) error{
		"link switched": func(dir, _ string) error {
			return errors.Join(os.Symlink("../good", filepath.Join(dir, "new")), os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, "file")))
		},
		"directory renamed": func(dir, _ string) error {
			return errors.Join(os.Rename(dir, dir+".old"), os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
		},
		"lazy unmount": func(_, dead string) error { return unix.Unmount(dead, unix.MNT_DETACH) },
	} {
		t.Run(name, func(t *testing.T) {
			dead, fail := deadMount(t)
			dir := filepath.Join(t.TempDir(), "config")
			check(t, errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(dir+"/../good", nil, 0o644), os.Symlink(dead+"/file", dir+"/file")))
			o := newObserver(dir+"/file", fsnotify.NewWatcher)
			a := armer{observer: o, limit: 100 * time.Millisecond}
			for range 10 {
				if seen := a.try().seen; seen != nil {
					t.Fatalf("got %v", seen)
				}
			}
			if n := hanging(o); n != 1 {
				t.Errorf("%d calls hang", n)
			}
			check(t, leave(dir, dead))
			<-o.wake
			a.limit = time.Minute
			if a.try().seen == nil {
				t.Error("no snapshot")
			}
			fail()
			a.end()
		})
	}
}

// hanging returns how many calls hang.
func hanging(o *observer) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.hung)
}

// end waits until no call hangs.
func (a *armer) end() {
	for hanging(a.observer) > 0 {
		<-a.observer.wake
	}
	a.observer.close()
}

func TestFewCallsHang(t *testing.T) {
	path := filepath.Join(t.TempDir(), "link")
	a := armer{observer: newObserver(path, fsnotify.NewWatcher), limit: 10 * time.Millisecond}
	var fails []func()
	for range 2 * maxHung {
		dead, fail := deadMount(t)
		fails = append(fails, fail)
		check(t, os.Symlink(dead+"/config", path+".new"))
		check(t, os.Rename(path+".new", path))
		if seen := a.try().seen; seen != nil {
			t.Fatalf("got %v", seen)
		}
	}
	if n := hanging(a.observer); n != maxHung {
		t.Errorf("%d calls hang", n)
	}
	for _, fail := range fails {
		fail()
	}
	a.end()
}
