package agent

import (
	"testing"
	"time"
)

func TestSlowRepairsAreReportedOnceEachTimeTheyBegin(t *testing.T) {
	var p pace
	now, reported := time.Now(), 0
	for _, tt := range []struct {
		pause    time.Duration // before the repairs
		repairs  int
		apart    time.Duration
		reported int // until then
		slow     bool
	}{
		{0, manyRepairs - 1, time.Second, 0, false},
		{0, 1, 0, 1, true},
		{0, 1000, time.Second, 1, true},
		{2 * repairWindow, manyRepairs - 1, time.Second, 1, false},
		{0, 1, time.Second, 2, true},
		{0, 100, repairWindow / (manyRepairs - 2), 2, false},
	} {
		now = now.Add(tt.pause)
		for range tt.repairs {
			now = now.Add(tt.apart)
			if p.restored(now) {
				reported++
			}
		}
		if slow := p.notBefore.Equal(now.Add(longPause - compareEvery/2)); reported != tt.reported || slow != tt.slow {
			t.Errorf("%+v: reported %d times, slow: %t", tt, reported, slow)
		}
	}
}
