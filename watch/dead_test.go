package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// deadMount mounts a file system that never responds. From fail on, every call of
// it returns an error.
func deadMount(t *testing.T) (dir string, fail func()) {
	t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	check(t, err)
	dir = t.TempDir()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())
	check(t, unix.Mount("dead", dir, "fuse", 0, options))
	t.Cleanup(func() {
		fuse.Close()
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	return dir, func() { check(t, fuse.Close()) }
}

func TestPathIsFollowedIntoADeadMountAndOutOnceItAnswers(t *testing.T) {
	dead, fail := deadMount(t)
	link, good := filepath.Join(t.TempDir(), "link"), filepath.Join(t.TempDir(), "good")
	check(t, errors.Join(os.WriteFile(good, []byte("good"), 0o644), os.Symlink(good, link)))
	ctx, stop := context.WithCancel(t.Context())
	p := unpaced()
	p.silence = 100 * time.Millisecond
	f := start(ctx, p, link)
	want := func(prefix string) {
		t.Helper()
		if got := <-f.content; !strings.HasPrefix(got, prefix) {
			t.Fatalf("got %q, want %q", got, prefix)
		}
	}
	want("good")
	check(t, errors.Join(os.Symlink(dead+"/file", link+".new"), os.Rename(link+".new", link)))
	want("its file system has not answered since ")
	check(t, errors.Join(os.Symlink(good, link+".new"), os.Rename(link+".new", link)))
	fail()
	want("good")
	stop()
	<-f.ended
}
