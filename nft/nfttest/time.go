package nfttest

import (
	"time"

	"golang.org/x/sys/unix"
)

// ThreadTime returns the processor time of the calling thread, which other programs do not change.
func ThreadTime() time.Duration {
	var t unix.Timespec
	Check(unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t))
	return time.Duration(t.Nano())
}
