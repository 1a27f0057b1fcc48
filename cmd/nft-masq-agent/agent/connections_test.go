package agent

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestStaleConnectionsAreCountedUntilNoneIsLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.files <- file("10.0.0.0/8")
		synctest.Wait()
		if n := w.recounts.Load(); n != 1 {
			t.Errorf("counted %d times at the start", n)
		}
		time.Sleep(time.Hour)
		if n := w.recounts.Load(); n != 1 {
			t.Errorf("counted %d times while none was stale", n)
		}
		w.stale.Store(3)
		w.files <- file("10.0.0.0/9")
		synctest.Wait()
		if n := w.agent.health.now().stale; n == nil || *n != 3 || w.recounts.Load() != 2 {
			t.Errorf("after a change: %v stale, counted %d times", n, w.recounts.Load())
		}
		time.Sleep(recountEvery)
		synctest.Wait()
		w.stale.Store(0)
		time.Sleep(time.Hour)
		if n := w.agent.health.now().stale; n == nil || *n != 0 || w.recounts.Load() != 4 {
			t.Errorf("at the end: %v stale, counted %d times", n, w.recounts.Load())
		}
		if told := w.logs.FilterMessageSnippet("existing connections").Len(); told != 1 {
			t.Errorf("told %d times", told)
		}
	})
}
