package nfttest

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// DeadMount makes processes that are started inside a namespace from now on see a
// file system that never responds, like one on a dead NFS server. No other process
// sees it. After fail, or when the test ends, it responds with errors.
func DeadMount(tb testing.TB, n *NS) (dir string, fail func()) {
	tb.Helper()
	Require(tb)
	dir = tb.TempDir()
	var (
		mu     sync.Mutex
		mounts []int
	)
	n.OnStart(func() error {
		fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse)
		if err := unix.Mount("dead", dir, "fuse", 0, options); err != nil {
			return errors.Join(err, unix.Close(fuse))
		}
		mu.Lock()
		defer mu.Unlock()
		mounts = append(mounts, fuse)
		return nil
	})
	fail = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, fuse := range mounts {
			report(tb, unix.Close(fuse)) // blocked calls return
		}
		mounts = nil
	}
	tb.Cleanup(fail)
	return dir, fail
}
