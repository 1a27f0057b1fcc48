package observe

import (
	"testing"
	"time"
)

func TestConnectionsAreReadLessOftenIfSlow(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Pass(10*time.Minute + time.Second)
		if n := w.readings; n != 11 {
			t.Errorf("read %d times in ten minutes", n)
		}
		w.Locked(func() { w.reading = 3 * time.Second }) // then 10 minutes pass
		w.Pass(time.Minute)
		w.Locked(func() { w.readings = 0 })
		w.Pass(100 * time.Minute)
		if n := w.readings; n < 9 || n > 10 {
			t.Errorf("read %d times in 100 minutes", n)
		}
		if every := w.all[2].(*ports).last.Load().interval; every != 10*time.Minute {
			t.Errorf("the metric is %s", every)
		}
	})
}
