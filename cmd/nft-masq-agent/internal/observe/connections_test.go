package observe

import (
	"testing"
	"time"
)

func TestEvidenceIsGatheredLessOftenIfThatIsSlow(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Gets("10.0.0.0/8")
		w.Pass(30 * time.Second)
		w.Locked(func() { w.gathering = task{cost: 3 * time.Second} }) // then 10 minutes pass
		w.Pass(time.Minute)
		w.Pass(9 * time.Minute)
		if n := w.gathering.begun; n != 1 {
			t.Errorf("gathered %d times in ten minutes", n)
		}
	})
}
