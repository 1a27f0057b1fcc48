package nfttest

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// DeadMount mounts a file system that never answers, as a dead NFS server does not,
// and unmounts it when the test ends.
func DeadMount(tb testing.TB) string {
	tb.Helper()
	Require(tb)
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		tb.Fatal(err)
	}
	dir := tb.TempDir()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())
	if err := unix.Mount("dead", dir, "fuse", 0, options); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		report(tb, unix.Unmount(dir, unix.MNT_DETACH))
		fuse.Close() // ends the calls that wait
	})
	return dir
}
