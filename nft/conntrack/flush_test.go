package conntrack

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

func anything(*Entry) bool { return true }

func ignore(int, *Judge) {}

// reads returns a function for a pass that returns one judge after the other.
func reads(all ...func() (*Judge, error)) func(context.Context) (*Judge, error) {
	return func(context.Context) (*Judge, error) {
		next := all[0]
		all = all[1:]
		return next()
	}
}

func by(j *Judge) func() (*Judge, error) { return func() (*Judge, error) { return j, nil } }

func left(t *testing.T, table *Tracker) (dsts []string) {
	t.Helper()
	for _, e := range entries(t, table, Filter{}) {
		dsts = append(dsts, e.Destination().Addr().String())
	}
	slices.Sort(dsts)
	return slices.Compact(dsts)
}

// What opens while a pass deletes is not in its list, so it ends.
func TestPassDeletesOnlyWhatWasStaleWhenItBeganAndStillIs(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	table := newTable(dialIn(ns))
	insert(t, ns, untranslated(20, "203.0.113.1")...)
	insert(t, ns, untranslated(20, "203.0.113.2")...) // exempt in the meantime
	insert(t, ns, untranslated(20, "203.0.113.3")...) // does not match
	insert(t, ns, untranslated(20, "10.9.0.1")...)    // exempt
	var listed []int
	p := Pass{
		Tracker: table,
		Matches: func(e *Entry) bool { return e.Destination().Addr() != netip.MustParseAddr("203.0.113.3") },
		Read: reads(
			by(judgeOf(func(*config.Config) {})),
			func() (*Judge, error) {
				insert(t, ns, untranslated(20, "203.0.113.4")...)
				policy := cases.CIDRs("10.0.0.0/8", "203.0.113.2/32")
				return judgeOf(func(c *config.Config) { c.NonMasqueradeCIDRs = policy }), nil
			},
		),
		Listed: func(n int, _ *Judge) { listed = append(listed, n) },
	}
	sockets := func() int {
		list := nfttest.In(t, ns, func() ([]byte, error) { return os.ReadFile("/proc/thread-self/net/netlink") })
		return strings.Count(string(list), "\n")
	}
	before := sockets()
	if err := p.Run(t.Context()); err != nil || p.Deleted != 20 || !slices.Equal(listed, []int{40}) {
		t.Errorf("deleted %d of %d: %v", p.Deleted, listed, err)
	}
	if _, err := table.Stats(); err != nil || sockets() != before {
		t.Errorf("%d sockets are open, before it were %d: %v", sockets(), before, err)
	}
	want := []string{"10.9.0.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"}
	if got := left(t, table); !slices.Equal(got, want) {
		t.Errorf("connections to %q are left, want %q", got, want)
	}
}

// Without stale connections a pass reads no second judge.
func TestPassWithNothingToDeleteEnds(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	insert(t, ns, untranslated(1, "203.0.113.1")...)
	listed := -1
	p := Pass{
		Tracker: newTable(dialIn(ns)), Matches: anything, Read: reads(by(judgeOf(exemptAll))),
		Listed: func(n int, _ *Judge) { listed = n },
	}
	for range 2 {
		if err := p.Run(t.Context()); err != nil || p.Deleted > 0 || listed != 0 {
			t.Errorf("deleted %d of %d: %v", p.Deleted, listed, err)
		}
	}
}

func withPort(a netip.AddrPort, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr(), port)
}

func TestNewerEntryWithTheSameAddressesAndPortsIsNotDeleted(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	table := newTable(dialIn(ns))
	insert(t, ns, untranslated(1, "203.0.113.9")...)
	now := entries(t, table, Filter{})[0]
	other := netip.MustParseAddrPort("203.0.113.8:53")
	for name, change := range map[string]func(*Entry){
		"another ID":                                 func(e *Entry) { e.ID++ },
		"the same ID, but another translation":       func(e *Entry) { e.Reply.Dst = other },
		"the same ID, but another port":              func(e *Entry) { e.Reply.Dst = withPort(e.Reply.Dst, 1) },
		"the same ID, but another destination":       func(e *Entry) { e.Reply.Src = other },
		"the same ID, but another address asked for": func(e *Entry) { e.Original.Dst = other },
	} {
		before := now.clone()
		change(&before)
		if remove(t, table, before) || len(entries(t, table, Filter{})) != 1 {
			t.Errorf("%s: it was deleted", name)
		}
	}
	if removeBy(t, table, now, judgeOf(exemptAll)) {
		t.Error("it was deleted although it is right")
	}
	if !remove(t, table, now) || remove(t, table, now) {
		t.Error("it was not deleted, or twice")
	}
}

func TestPassEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	const all, few = 300, 20
	insert(t, ns, untranslated(all, "203.0.113.9")...)
	for _, when := range []string{"listing", "reading", "deleting"} {
		ctx, cancel := context.WithCancel(t.Context())
		listed := false
		stop := func(at string) {
			if at == when {
				cancel()
			}
		}
		p := Pass{
			Tracker: newTable(throughSocket(dialIn(ns), func(n int) error {
				if listed && n == few {
					stop("deleting")
				}
				return nil
			})),
			Matches: func(*Entry) bool {
				stop("listing")
				return true
			},
			Read: reads(by(judgeOf(masqueradeAll)), func() (*Judge, error) {
				listed = true
				stop("reading")
				return judgeOf(masqueradeAll), nil
			}),
			Listed: ignore,
		}
		before := len(entries(t, newTable(dialIn(ns)), Filter{}))
		err := p.Run(ctx)
		after := len(entries(t, newTable(dialIn(ns)), Filter{}))
		wrong := p.Deleted != before-after || p.Deleted > few || p.Deleted > 0 != (when == "deleting")
		if wrong || !errors.Is(err, context.Canceled) {
			t.Errorf("canceled while %s: deleted %d, %d of %d are left: %v", when, p.Deleted, after, before, err)
		}
		cancel()
	}
}

// A failure does not end a pass for good: what was listed is deleted when Run is called again.
func TestFailedPassContinuesWithItsList(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	const all = 30
	insert(t, ns, untranslated(all, "203.0.113.9")...)
	var failing string
	broken := errors.New("broken")
	judge := judgeOf(masqueradeAll)
	listings, lists := 0, 0
	p := Pass{
		Tracker: newTable(throughSocket(dialIn(ns), func(n int) error {
			if failing == "reply" && n == 10 {
				return broken
			}
			return nil
		})),
		Matches: func(*Entry) bool {
			listings++
			return true
		},
		Read: func(context.Context) (*Judge, error) {
			switch {
			case failing == "first judge", failing == "second judge" && listings == all:
				return nil, broken
			}
			return judge, nil
		},
		Listed: func(int, *Judge) { lists++ },
	}
	for _, failing = range []string{"first judge", "reply", "second judge"} {
		listings = 0
		if err := p.Run(t.Context()); !errors.Is(err, broken) || p.Deleted > 0 {
			t.Errorf("%s: deleted %d: %v", failing, p.Deleted, err)
		}
	}
	failing = "reply" // while it deletes
	if err := p.Run(t.Context()); !errors.Is(err, broken) || p.Deleted == 0 || p.Deleted == all {
		t.Errorf("deleted %d: %v", p.Deleted, err)
	}
	failing = ""
	insert(t, ns, untranslated(1, "203.0.113.1")...)
	if err := p.Run(t.Context()); err != nil || p.Deleted != all || listings != all || lists != 1 {
		t.Errorf("deleted %d of %d, of which %d were listed, %d times: %v", p.Deleted, all, listings, lists, err)
	}
	if got := left(t, newTable(dialIn(ns))); !slices.Equal(got, []string{"203.0.113.1"}) {
		t.Errorf("connections to %q are left", got)
	}
}

func TestPassDeletesAtMostTenThousandASecond(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	const stale = 3000
	insert(t, ns, untranslated(stale, "203.0.113.9")...)
	p := Pass{
		Tracker: newTable(dialIn(ns)), Matches: anything, Listed: ignore,
		Read: func(context.Context) (*Judge, error) { return judgeOf(masqueradeAll), nil },
	}
	start := time.Now()
	if err := p.Run(t.Context()); err != nil || p.Deleted != stale {
		t.Errorf("deleted %d: %v", p.Deleted, err)
	}
	if took, least := time.Since(start), (stale-2*flushStep)*time.Second/flushRate; took < least {
		t.Errorf("%d were deleted within %s, faster than %d per second", stale, took, flushRate)
	}
}
