package observe

import (
	"testing"
	"time"
)

func TestSearchesForOlderAgentsTakeAtMostHalfAPercentOfTheTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.searchCost = 3 * time.Second
		w.Gets("10.0.0.0/8")
		const long = 2 * time.Hour
		w.Next(long, time.Second)
		w.Locked(func() {
			// 0.5 % of the time, as nft/README.md says.
			if most := int(long/(200*w.searchCost)) + 1; w.searches > most || w.searches < most-1 {
				t.Errorf("%d searches, want at most %d", w.searches, most)
			}
		})
	})
}
