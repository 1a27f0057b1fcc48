package agent

import (
	"testing"
	"time"
)

// Figures of nft/README.md and SPEC.md. Tests assert these, whatever the program's constants are.
const (
	restoredWithin = 250 * time.Millisecond
	inARow         = 22 * time.Second

	// 0.4 % of one CPU for rules, 0.1 % for elements, 0.5 % for addresses.
	ofRules, ofElements, ofAddresses = 250, 1000, 200
)

func TestSlowRepairsAreReportedOnceEachTimeTheyBegin(t *testing.T) {
	p := pace{share: ofRules, maxPause: rulesPause}
	now, reported := time.Now(), 0
	for _, tt := range []struct {
		pause    time.Duration // before the repairs
		repairs  int
		apart    time.Duration
		reported int // until then
		slow     bool
	}{
		{0, 29, restoredWithin, 0, false},
		{0, 1, restoredWithin, 1, true},
		{0, 1000, time.Second, 1, true},
		{2 * inARow, 29, restoredWithin, 1, false},
		{0, 1, restoredWithin, 2, true},
		{0, 100, 2 * time.Second, 2, false},
	} {
		now = now.Add(tt.pause)
		for range tt.repairs {
			now = now.Add(tt.apart)
			if p.repaired(now, 0) {
				reported++
			}
		}
		if slow := !p.ready(now); reported != tt.reported || slow != tt.slow {
			t.Errorf("%+v: reported %d times, slow: %t", tt, reported, slow)
		}
	}
}

// However much was spent, and however often, no pause is longer than the bound; and however
// others use it, a pace lets them have its share of the time, and that of 22 s at once.
func TestPaceLimitsProcessorTimeAndPauses(t *testing.T) {
	for _, cost := range []time.Duration{
		time.Microsecond, time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond, time.Second, time.Hour,
	} {
		p, begun := pace{share: ofRules, maxPause: 10 * time.Second}, time.Now()
		var spent, pause time.Duration
		now, last := begun, begun
		for ; now.Sub(begun) < time.Hour; now = now.Add(restoredWithin) {
			if p.ready(now) {
				p.spend(now, cost)
				spent, pause, last = spent+cost, max(pause, now.Sub(last)), now
			}
		}
		if pause > p.maxPause {
			t.Errorf("work of %s has pauses of %s", cost, pause)
		}
		if most := (time.Hour+inARow)/ofRules + cost; ofRules*cost <= p.maxPause && spent > most {
			t.Errorf("work of %s takes %s in an hour, more than %s", cost, spent, most)
		}
	}
}

func TestProcessorTimeIsThatOfWorkAndNotOfWaiting(t *testing.T) {
	before := ProcessorTime()
	for n := 0; ProcessorTime() == before; n++ {
		if n > 1e9 {
			t.Fatal("work takes no processor time")
		}
	}
	before = ProcessorTime()
	time.Sleep(200 * time.Millisecond)
	if used := ProcessorTime() - before; used > 100*time.Millisecond {
		t.Errorf("200 ms of sleep took %s of processor time", used)
	}
}

// Garbage that a check leaves, and that the program wakes up, costs processor time outside of the check. What
// observers do meanwhile is not charged to it.
func TestACheckIsChargedForWhatItCausesUpToHalfAsMuch(t *testing.T) {
	s := &schedule{}
	for _, tt := range []struct{ begun, ended, cost time.Duration }{
		{0, 1000, 1000}, // nothing has happened before
		{1200, 2200, 1200},
		{2200, 3200, 1000},
		{9000, 10_000, 1500}, // an observer has computed
	} {
		if cost := s.cost(tt.begun, tt.ended); cost != tt.cost {
			t.Errorf("from %d to %d: %d, want %d", tt.begun, tt.ended, cost, tt.cost)
		}
	}
}

func TestOneExpensiveRepairIsNoFight(t *testing.T) {
	start := time.Now()
	p := pace{share: rulesShare, maxPause: rulesPause}
	if p.repaired(start, time.Second) {
		t.Error("the first repair is called slowed down")
	}
	if !p.repaired(start.Add(rulesPause), time.Second) {
		t.Error("the second one is not")
	}
	later := start.Add(time.Hour)
	if p.repaired(later, time.Second) {
		t.Error("one after a quiet time is called slowed down")
	}
}
