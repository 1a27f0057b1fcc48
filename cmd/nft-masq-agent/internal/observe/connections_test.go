package observe

import (
	"testing"
	"time"
)

func TestConnectionsAreReadLessOftenIfSlow(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Pass(10*time.Minute + time.Second)
		if n := w.reading.begun; n != 11 {
			t.Errorf("read %d times in ten minutes", n)
		}
		w.Locked(func() { w.reading.cost = 3 * time.Second }) // then 10 minutes pass
		w.Pass(time.Minute)
		w.Locked(func() { w.reading.begun = 0 })
		w.Pass(100 * time.Minute)
		if n := w.reading.begun; n < 9 || n > 10 {
			t.Errorf("read %d times in 100 minutes", n)
		}
		if every := w.all[2].(*ports).last.Load().interval; every != 10*time.Minute {
			t.Errorf("the metric is %s", every)
		}
	})
}

// A reading that another policy ended after a tenth of a second is done again after 200 times as long.
func TestConnectionsAreReadAgainForThePolicyThatEndedAReading(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Pass(time.Second)
		w.Locked(func() { w.reading = task{cost: time.Hour} })
		w.Pass(59*time.Second + 100*time.Millisecond)
		w.Gets("10.0.0.0/8")
		w.Locked(func() {
			if w.reading.begun != 1 || w.reading.ended != 1 {
				t.Fatalf("%+v, want one that ended", w.reading)
			}
		})
		w.Pass(19 * time.Second)
		w.Locked(func() {
			if w.reading.begun != 1 {
				t.Errorf("%+v, want none so soon", w.reading)
			}
		})
		w.Pass(time.Second)
		w.Locked(func() {
			if w.reading.begun != 2 {
				t.Errorf("%+v, want another one", w.reading)
			}
		})
	})
}
