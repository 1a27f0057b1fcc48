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

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/loop"
	"nft-masq-agent/nft/node"
)

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
	for i, every := range committers() {
		for j, size := range sizes() {
			if (i+j)%3 > 0 && !nfttest.Long() {
				continue // each of them is among the others
			}
			t.Run(fmt.Sprintf("commit every %s, %s", every, size.name), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.Settle()
					w.Locked(func() { w.Cost, w.FrameCost = size.elements, size.frames })
					w.Next(time.Second, every)
					for range 3 {
						w.Locked(func() { w.Stall = 2 * time.Second })
						w.Next(3*time.Second, every)
					}
					w.Locked(func() { w.Stall = 0 })
					w.Next(2*time.Second+size.elements, every) // a check that is stalled ends, but no long pause
					synctest.Wait()
					w.Messages()
					w.Tamper()
					// A check of elements may begin at the same time.
					w.Next(restoredWithin+size.elements+size.frames, every)
					w.WantLines("rules were changed by another program; restored")
				})
			})
		}
	}
}

// restored is within what time elements are compared next to a program that commits all the time.
func (s size) restored() time.Duration {
	if s.elements > 25*time.Millisecond {
		return 10 * time.Minute
	}
	return 30 * time.Second
}

func TestElementsAreRestoredWithinTheirTimeHoweverSlowChecksAre(t *testing.T) {
	t.Parallel()
	for i, every := range committers() {
		for j, size := range sizes() {
			for k, stall := range []time.Duration{0, time.Second} {
				if (i+j+k)%2 > 0 && !nfttest.Long() {
					continue // with another stall
				}
				t.Run(fmt.Sprintf("commit every %s, %s, stalls of %s", every, size.name, stall), func(t *testing.T) {
					inBubble(t, func(t *testing.T, w *world) {
						w.Settle()
						w.Locked(func() { w.Cost, w.FrameCost, w.Stall = size.elements, size.frames, stall })
						rounds := nfttest.Rounds(1, 2, 3)
						if stall > 0 && !nfttest.Long() {
							rounds = 1
						}
						for range rounds {
							w.Next(size.restored()/4, every)
							w.Messages()
							w.Locked(func() { w.Exchanged = true })
							w.Next(size.restored(), every)
							w.WantLines("rules were changed by another program; restored")
						}
					})
				})
			}
		}
	}
}

func TestReturningRulesOfOlderAgentsAreRemovedWithinTheirTimeHoweverSlowChecksAre(t *testing.T) {
	named(t, "(takeover)", func(t *testing.T, w *world) {
		w.Settle()
		for _, size := range sizes() {
			w.Locked(func() { w.Cost, w.FrameCost = size.elements, size.frames })
			w.Next(10*time.Second, 20*time.Millisecond)
			w.Locked(func() { w.Older = loop.OlderChains("idle") })
			w.Next(size.restored(), 20*time.Millisecond)
			w.Locked(func() {
				if len(w.Older) > 0 {
					t.Errorf("%s: still there after %s", size.name, size.restored())
				}
			})
		}
	})
}

// A program that adds an element again and again, or deletes rules, makes us write again and
// again.
func TestRepairsCostAtMostTheirShareOfTheTimeOrTheirPausesAreTheLongest(t *testing.T) {
	const long = 4 * time.Minute
	most := func(cost time.Duration, share int, longest time.Duration) time.Duration {
		if time.Duration(share)*cost > longest {
			return time.Duration(int64(long/longest)+2) * cost
		}
		return (long+inARow)/time.Duration(share) + cost
	}
	costs := []time.Duration{1200 * time.Millisecond, 80 * time.Millisecond, 5 * time.Millisecond}
	for _, cost := range costs[:nfttest.Rounds(2, len(costs), len(costs))] {
		for _, rules := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, rules: %t", cost, rules), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *world) {
					w.Settle()
					w.Cost = cost
					limit := time.Duration(int64(long/time.Minute))*cost + most(cost, ofElements, elementsPause) // resyncs are extra
					if rules {
						w.FrameCost = cost
						limit += most(cost, ofRules, rulesPause)
					}
					for begun := time.Now(); time.Since(begun) < long; time.Sleep(time.Second) {
						w.Locked(func() {
							if w.Exchanged = true; rules {
								w.Held = "tampered"
							}
						})
						w.Commit()
					}
					synctest.Wait()
					w.Locked(func() {
						if w.Used > limit {
							t.Errorf("%s of processor time in %s, want at most %s", w.Used, long, limit)
						}
					})
				})
			})
		}
	}
}

func TestFlappingAddressesAreFollowedWithinThePaceAndRightInTheEnd(t *testing.T) {
	for _, cost := range []time.Duration{time.Millisecond, 10 * time.Millisecond, time.Second} {
		t.Run(cost.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.Listed = cases.Addrs("198.51.100.11")
				w.Deliver([]config.Source{{Name: "config", Data: []byte(snat)}}, nil)
				synctest.Wait()
				w.Locked(func() { w.Cost, w.FrameCost, w.Used = cost, cost, 0 })
				deliver := func(list string) {
					w.Locked(func() { w.Listed = cases.Addrs(strings.Fields(list)...) })
					select {
					case <-w.Moves:
					default:
					}
					w.Moves <- node.Change{Addresses: cases.Addrs(strings.Fields(list)...), At: time.Now()}
					synctest.Wait()
				}
				writes, begun := len(w.Writes), time.Now()
				for n := 0; time.Since(begun) < 50*time.Second; n++ {
					deliver([]string{"198.51.100.11", "198.51.100.65"}[n%2])
					time.Sleep(5 * time.Millisecond)
				}
				most := int((50*time.Second+inARow)/min(max(ofAddresses*cost, time.Second), addressesPause)) + 2
				w.Locked(func() {
					if n := len(w.Writes) - writes; n > most {
						t.Errorf("%d changes within 50 s, want at most %d", n, most)
					}
				})
				deliver("198.51.100.66")
				w.Pass(addressesPause + 3*cost) // a check may be under way, and another one due
				if !strings.HasSuffix(w.Held, "[198.51.100.66]") {
					t.Errorf("the kernel has %s", w.Held)
				}
				if v := w.agent.current(); len(v.addresses) != 1 || v.addresses[0] != netip.MustParseAddr("198.51.100.66") {
					t.Errorf("the addresses are %v", v.addresses)
				}
			})
		})
	}
}

// Whatever a check that is interrupted returns, "exiting" has been the last line.
func TestAgentThatEndsDuringACheckLogsNothing(t *testing.T) {
	for _, err := range []error{
		nil, unix.EINTR, unix.EBADF, &nfnetlink.RejectedError{Op: nfnetlink.CreateRule, Err: unix.ENOMEM},
		fmt.Errorf("send transaction: %w", errors.New("i/o timeout")),
	} {
		t.Run(fmt.Sprint(err), func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.Settle()
				w.Locked(func() { w.Ends, w.Cost = true, time.Second })
				w.Reject(err)
				w.Gets("11.0.0.0/8")
				w.Pass(2 * time.Second)
				w.WantLines()
			})
		})
	}
}
