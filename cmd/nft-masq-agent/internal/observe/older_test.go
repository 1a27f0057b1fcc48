package observe

import (
	"os"
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

// A pass that takes an hour ends when another policy is decided, and is done again for that.
func TestPassesGiveWayToAnotherPolicy(t *testing.T) {
	for name, begin := range map[string]func(*world) (passes *int){
		"a search for older agents": func(w *world) *int {
			w.searchCost = time.Hour
			return &w.searches
		},
		"a look at the node": func(w *world) *int {
			w.checkCost = time.Hour
			return &w.checks
		},
		"a reading of connections": func(w *world) *int {
			w.reading = time.Hour
			return &w.readings
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.Settle()
				var passes *int
				w.Locked(func() {
					passes = begin(w)
					*passes = 0
				})
				w.Hangup <- os.Interrupt
				w.Pass(2 * time.Minute)
				w.Commit() // which is no other policy
				w.Pass(time.Minute)
				w.Locked(func() {
					if *passes != 1 || w.ended != 0 {
						t.Errorf("%d passes, of which %d have ended; want one that is under way", *passes, w.ended)
					}
				})
				w.Gets("11.0.0.0/8")
				w.Locked(func() {
					if w.ended != 1 {
						t.Errorf("%d passes have ended with the policy, want one", w.ended)
					}
				})
				w.Pass(2 * time.Minute)
				w.Locked(func() {
					if *passes != 2 {
						t.Errorf("%d passes, want another one for the new policy", *passes)
					}
				})
			})
		})
	}
}
