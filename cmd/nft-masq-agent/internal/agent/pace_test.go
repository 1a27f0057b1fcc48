package agent

import (
	"testing"
	"time"
)

func TestSlowRepairsAreReportedOnceEachTimeTheyBegin(t *testing.T) {
	var p pace
	now, reported := time.Now(), 0
	repair := func(writer uint32) {
		now = now.Add(max(0, p.repairAt.Sub(now)) + 20*time.Millisecond)
		p.restored(now, writer)
		if p.slowed() {
			reported++
		}
	}
	// With a new socket each time, so that the pace alternates between slow and
	// not.
	for writer := range uint32(1000) {
		repair(writer + 1)
	}
	if reported != 1 {
		t.Errorf("reported %d times", reported)
	}
	now = now.Add(2 * repairWindow)
	for range 100 {
		repair(1)
	}
	if reported != 2 {
		t.Errorf("reported %d times, want a second time after a pause", reported)
	}
}
