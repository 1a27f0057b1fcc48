package observe

import (
	"os"
	"testing"
	"time"
)

func TestSearchesForOlderAgentsTakeAtMostHalfAPercentOfTheTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.search.cost = 3 * time.Second
		w.Gets("10.0.0.0/8")
		const long = 2 * time.Hour
		w.Next(long, time.Second)
		w.Locked(func() {
			// 0.5 % of the time, as nft/README.md says.
			if most := int(long/(200*w.search.cost)) + 1; w.search.begun > most || w.search.begun < most-1 {
				t.Errorf("%d searches, want at most %d", w.search.begun, most)
			}
		})
	})
}

// A pass that takes an hour ends when another policy is decided, and is done again for that.
func TestPassesGiveWayToAnotherPolicy(t *testing.T) {
	for name, choose := range map[string]func(*world) *task{
		"a search for older agents": func(w *world) *task { return &w.search },
		"a look at the node":        func(w *world) *task { return &w.look },
		"a reading of connections":  func(w *world) *task { return &w.gathering },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				passes := choose(w)
				w.Settle()
				w.Locked(func() { *passes = task{cost: time.Hour} })
				w.Hangup <- os.Interrupt
				w.Pass(2 * time.Minute)
				w.Commit() // which is no other policy
				w.Pass(time.Minute)
				w.Locked(func() {
					if passes.begun != 1 || passes.ended != 0 {
						t.Errorf("%+v, want one that is under way", *passes)
					}
				})
				w.Gets("11.0.0.0/8")
				w.Locked(func() {
					if passes.ended != 1 {
						t.Errorf("%+v, want one that ended with the policy", *passes)
					}
				})
				w.Pass(2 * time.Minute)
				w.Locked(func() {
					if passes.begun != 2 {
						t.Errorf("%+v, want another one for the new policy", *passes)
					}
				})
			})
		})
	}
}
