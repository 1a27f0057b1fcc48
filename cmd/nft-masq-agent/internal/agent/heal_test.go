package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/node"
)

// next is time with a neighbor that commits every so often.
func (w *world) next(d, every time.Duration) {
	for begun := time.Now(); time.Since(begun) < d; time.Sleep(min(every, d)) {
		w.commit()
	}
	synctest.Wait()
}

// committers returns how often programs commit: 5, 50 and 500 times a second.
func committers() []time.Duration {
	return []time.Duration{200 * time.Millisecond, 20 * time.Millisecond, 2 * time.Millisecond}
}

// A size is what checks of a config cost: everything, and everything but elements.
type size struct {
	name             string
	elements, frames time.Duration
}

func sizes() []size {
	return []size{
		{"2 CIDRs", 300 * time.Microsecond, 150 * time.Microsecond},
		{"10,000 CIDRs", 10 * time.Millisecond, 150 * time.Microsecond},
		{"100,000 CIDRs", 350 * time.Millisecond, 200 * time.Microsecond},
		{"100,000 CIDRs, slow machine", 3 * time.Second, time.Millisecond},
	}
}

// A virtual machine that is stopped, a process that is, or memory pressure: a check takes
// long, but costs little.
func TestStalledChecksDelayNoRepairs(t *testing.T) {
	for _, every := range committers() {
		for _, size := range sizes() {
			t.Run(fmt.Sprintf("commit every %s, %s", every, size.name), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.settled(t)
					w.locked(func() { w.cost, w.frameCost = size.elements, size.frames })
					w.next(time.Second, every)
					for range 3 {
						w.locked(func() { w.stall = 2 * time.Second })
						w.next(3*time.Second, every)
					}
					w.locked(func() { w.stall = 0 })
					w.next(2*time.Second+size.elements, every) // a check that is stalled ends, but no long pause
					synctest.Wait()
					w.messages()
					w.tamper()
					// A check of elements may begin at the same time.
					w.next(restoredWithin+size.elements+size.frames, every)
					wantLines(t, w.messages(), "rules were changed by another program; restored")
				})
			})
		}
	}
}

func TestElementsAreRestoredWithinThirtySecondsHoweverSlowChecksAre(t *testing.T) {
	for _, every := range committers() {
		for _, size := range sizes() {
			for _, stall := range []time.Duration{0, time.Second} {
				t.Run(fmt.Sprintf("commit every %s, %s, stalls of %s", every, size.name, stall), func(t *testing.T) {
					inBubble(t, func(t *testing.T, w *world) {
						w.settled(t)
						w.locked(func() { w.cost, w.frameCost, w.stall = size.elements, size.frames, stall })
						for range 3 {
							w.next(elementsPause/4, every)
							w.messages()
							w.locked(func() { w.exchanged = true })
							w.next(30*time.Second, every)
							wantLines(t, w.messages(), "rules were changed by another program; restored")
						}
					})
				})
			}
		}
	}
}

func TestReturningRulesOfOlderAgentsAreRemovedWithinThirtySecondsHoweverSlowChecksAre(t *testing.T) {
	bubble(t, true, func(t *testing.T, w *world) {
		w.settled(t)
		w.locked(func() { w.cost, w.frameCost = 3*time.Second, time.Millisecond })
		for range 3 {
			w.next(10*time.Second, 20*time.Millisecond)
			w.find(legacy())
			w.next(30*time.Second, 20*time.Millisecond)
			if len(w.seen().Legacy) > 0 {
				t.Error("still there after 30 s")
			}
		}
	})
}

// A program that adds an element again and again, or deletes rules, makes us write again and
// again.
func TestRepairsCostAtMostHalfAPercentOfTheTimeOrTheirPausesAreTheLongest(t *testing.T) {
	const long = 4 * time.Minute
	most := func(cost, longest time.Duration) time.Duration {
		if cpuShare*cost > longest {
			return time.Duration(int64(long/longest)+2) * cost
		}
		return (long+inARow)/cpuShare + cost
	}
	costs := []time.Duration{1200 * time.Millisecond, 80 * time.Millisecond, 5 * time.Millisecond}
	for _, cost := range costs[:nfttest.Rounds(2, len(costs), len(costs))] {
		for _, rules := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, rules: %t", cost, rules), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.settled(t)
					w.cost = cost
					limit := time.Duration(int64(long/time.Minute))*cost + most(cost, elementsPause) // resyncs are extra
					if rules {
						w.frameCost = cost
						limit += most(cost, rulesPause)
					}
					for begun := time.Now(); time.Since(begun) < long; time.Sleep(time.Second) {
						w.locked(func() {
							if w.exchanged = true; rules {
								w.held = "tampered"
							}
						})
						w.commit()
					}
					synctest.Wait()
					w.locked(func() {
						if w.used > limit {
							t.Errorf("%s of processor time in %s, want at most %s", w.used, long, limit)
						}
					})
				})
			})
		}
	}
}

// Programs that commit all the time keep us from writing: the kernel then says ERESTART,
// and about a list that it changed while it was read.
func TestRulesThatOthersDelayAreNotRejected(t *testing.T) {
	for _, err := range []error{
		&nfnetlink.RefusedError{Op: nfnetlink.CreateRule, Err: unix.ERESTART},
		fmt.Errorf("commit: %w", unix.ERESTART), fmt.Errorf("list rules: %w", nfnetlink.ErrInterrupted),
	} {
		t.Run(err.Error(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.settled(t)
				w.refuse(fmt.Errorf("%w: %w", nfnetlink.ErrBusy, err))
				w.files <- file("11.0.0.0/8")
				w.next(20*time.Second, 20*time.Millisecond)
				lines := w.logs.TakeAll()
				if len(lines) != 1 || lines[0].ContextMap()["event"] != "rules_delayed" || lines[0].ContextMap()["hint"] != nil {
					t.Errorf("logged %+v", lines)
				}
				ready, r := w.agent.Ready(), w.agent.Report()
				if ready == nil || strings.Contains(ready.Error(), "rejected") || strings.Contains(ready.Error(), "modprobe") ||
					!strings.Contains(ready.Error(), "other programs") || !r.Delayed || r.Refusal != ready.Error() {
					t.Errorf("not ready because of %v; report: %+v", ready, r)
				}
				_, metrics := get(t, w.agent, "/metrics")
				for result, n := range map[string]int{delayedResult: 1, refusedResult: 0} {
					if line := fmt.Sprintf("applies_total{reason=\"config\",result=%q} %d\n", result, n); !strings.Contains(
						metrics,
						line,
					) {
						t.Errorf("no metric %s", line)
					}
				}
				w.refuse(nil)
				w.next(10*time.Second, 20*time.Millisecond)
				wantLines(t, w.messages(), "the rules are checked and in place in spite of other programs' changes", "applied")
				if w.held != hashOf(t, file("11.0.0.0/8")) || w.agent.Ready() != nil || w.agent.Report().Delayed {
					t.Errorf("the kernel has %s, ready: %v", w.held, w.agent.Ready())
				}
			})
		})
	}
}

// Rules in force stay so while a check does not come to an end, and other checks go on.
func TestCheckThatOthersDelayIsRepeatedWithoutALine(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.settled(t)
		w.locked(func() { w.cost, w.frameCost = 10*time.Millisecond, 150*time.Microsecond })
		w.refuse(fmt.Errorf("%w: list elements: %w", nfnetlink.ErrBusy, nfnetlink.ErrInterrupted))
		w.next(10*time.Minute, 20*time.Millisecond)
		if err := w.agent.Ready(); err != nil {
			t.Errorf("not ready: %v", err)
		}
		wantLines(t, w.messages())
		w.refuse(nil)
		w.locked(func() { w.exchanged = true })
		pass(3 * time.Second) // the neighbor is gone, too
		wantLines(t, w.messages(), "rules were changed by another program; restored")
	})
}

func TestFlappingAddressesAreFollowedWithinThePaceAndRightInTheEnd(t *testing.T) {
	for _, cost := range []time.Duration{time.Millisecond, 10 * time.Millisecond, time.Second} {
		t.Run(cost.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.lists("198.51.100.11")
				w.gets(snatFile())
				w.locked(func() { w.cost, w.frameCost, w.used = cost, cost, 0 })
				deliver := func(list string) {
					w.lists(list)
					select {
					case <-w.moves:
					default:
					}
					w.moves <- node.Change{Addresses: addrs(list)}
					synctest.Wait()
				}
				writes, begun := len(w.writes), time.Now()
				for n := 0; time.Since(begun) < 50*time.Second; n++ {
					deliver([]string{"198.51.100.11", "198.51.100.65"}[n%2])
					time.Sleep(5 * time.Millisecond)
				}
				most := int((50*time.Second+inARow)/min(cpuShare*max(cost, leastRepair), addressesPause)) + 2
				w.locked(func() {
					if n := len(w.writes) - writes; n > most {
						t.Errorf("%d changes within 50 s, want at most %d", n, most)
					}
				})
				deliver("198.51.100.66")
				pass(addressesPause + 3*cost) // a check may be under way, and another one due
				if !strings.HasSuffix(w.held, "[198.51.100.66]") {
					t.Errorf("the kernel has %s", w.held)
				}
				if v := w.agent.now(); len(v.addresses) != 1 || v.addresses[0] != netip.MustParseAddr("198.51.100.66") {
					t.Errorf("the addresses are %v", v.addresses)
				}
			})
		})
	}
}

// Whatever a check that is interrupted returns, "exiting" has been the last line.
func TestAgentThatEndsDuringACheckLogsNothing(t *testing.T) {
	for _, err := range []error{
		nil, unix.EINTR, unix.EBADF, &nfnetlink.RefusedError{Op: nfnetlink.CreateRule, Err: unix.ENOMEM},
		fmt.Errorf("send transaction: %w", errors.New("i/o timeout")),
	} {
		t.Run(fmt.Sprint(err), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.settled(t)
				w.locked(func() { w.ends, w.cost = true, time.Second })
				w.refuse(err)
				w.files <- file("11.0.0.0/8")
				pass(2 * time.Second)
				wantLines(t, w.messages())
			})
		})
	}
}
