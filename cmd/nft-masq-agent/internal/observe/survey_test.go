package observe

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/trace"
)

// one returns a rule of a table that masquerades.
func one(table string) []neighbors.Conflict {
	return []neighbors.Conflict{conflict(nfnetlink.Rule{Table: table}, "")}
}

// conflict returns a rule that is reached from a base chain, and masquerades.
func conflict(r nfnetlink.Rule, base string) neighbors.Conflict {
	from := &trace.Chain{Chain: nfnetlink.Chain{Name: base, Hook: &nfnetlink.Hook{}}}
	return neighbors.Conflict{Finding: trace.Finding{Rule: r, Base: from}}
}

const contradicted = "another program's rule masquerades what the config exempts"

func TestRepairsDoNotWaitForASurvey(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.surveyCost = time.Hour
		w.find(neighbors.Others{Conflicts: one("nat")})
		w.settled(t)
		w.tamper()
		pass(compareEvery)
		wantLines(t, w.messages(), "rules were changed by another program; restored")
		pass(time.Hour)
		wantLines(t, w.messages(), contradicted)
	})
}

// A survey that a config change or SIGHUP has made useless is followed by another
// one at once.
func TestSurveysRunOneAtATime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.surveyCost = time.Minute
		w.find(neighbors.Others{Conflicts: one("nat")})
		w.files <- file("10.0.0.0/8")
		time.Sleep(time.Second)
		w.find(neighbors.Others{})
		w.files <- file("100.64.0.0/10")
		time.Sleep(time.Second)
		w.locked(func() { w.deep = 0 })
		w.hangup <- unix.SIGHUP
		synctest.Wait()
		wantLines(t, w.messages(), "starting", "applied", "applied")
		synctest.Wait()
		w.locked(func() {
			if w.surveys != 1 || w.deep != 1 {
				t.Errorf("%d surveys, %d deep checks", w.surveys, w.deep)
			}
		})
		pass(time.Minute - time.Second)
		w.locked(func() {
			if w.surveys != 2 {
				t.Errorf("%d surveys", w.surveys)
			}
		})
		pass(time.Minute)
		wantLines(t, w.messages()) // the first survey was for another policy
		w.hangup <- unix.SIGHUP
		synctest.Wait()
		if w.surveys != 3 {
			t.Errorf("%d surveys", w.surveys)
		}
	})
}

func TestSurveysTakeAtMostHalfAPercentOfTheTime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.surveyCost = 3 * time.Second
		w.files <- file("10.0.0.0/8")
		const long = 2 * time.Hour
		for start := time.Now(); time.Since(start) < long; time.Sleep(time.Second) {
			w.commit()
		}
		w.locked(func() {
			// 0.5 % of the time, as nft/README.md says.
			if most := int(long/(200*w.surveyCost)) + 1; w.surveys > most || w.surveys < most-1 {
				t.Errorf("%d surveys, want at most %d", w.surveys, most)
			}
		})
	})
}

// Each of a thousand base chains leads to rules that contradict the config.
func TestSurveyLogsABoundedNumberOfLines(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		const bases = 1000
		var found neighbors.Others
		for i := range 5 * bases {
			r := nfnetlink.Rule{Table: "nat", Chain: fmt.Sprintf("pod-%d", i), Handle: uint64(i)}
			found.Conflicts = append(found.Conflicts, conflict(r, fmt.Sprintf("base-%d", i%bases)))
		}
		w.find(found)
		w.gets(file("10.0.0.0/8"))
		lines, counted := 0, int64(0)
		for _, e := range w.logs.TakeAll() {
			lines++
			switch fields := e.ContextMap(); fields["event"] {
			case "foreign_masquerade":
				counted++
			case "further_foreign_rules":
				counted += fields["rules"].(int64)
			}
		}
		if most := 2 + maxLogged + 1; lines > most {
			t.Errorf("%d lines, want at most %d", lines, most)
		}
		if counted != 5*bases {
			t.Errorf("%d rules logged or counted, want %d", counted, 5*bases)
		}
	})
}
