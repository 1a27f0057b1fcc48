package agent

import (
	"testing"
	"time"
)

func TestSlowRepairsAreSaidOnceEachTimeTheyBegin(t *testing.T) {
	var p pace
	now, said := time.Now(), 0
	repair := func(writer uint32) {
		now = now.Add(max(0, p.repairAt.Sub(now)) + 20*time.Millisecond)
		p.restored(now, writer)
		if p.slowed() {
			said++
		}
	}
	// By somebody who comes anew each time, so that the pace is slow and not
	// slow by turns.
	for writer := range uint32(1000) {
		repair(writer + 1)
	}
	if said != 1 {
		t.Errorf("said %d times", said)
	}
	now = now.Add(2 * repairWindow)
	for range 100 {
		repair(1)
	}
	if said != 2 {
		t.Errorf("said %d times, want a second time after a pause", said)
	}
}
