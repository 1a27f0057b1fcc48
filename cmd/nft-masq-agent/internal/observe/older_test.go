package observe

import (
	"errors"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
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
					if passes.ended != 1 || w.Logs.FilterMessageSnippet("cannot").Len() > 0 {
						t.Errorf("%+v, want one that ended with the policy: %q", *passes, w.Messages())
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

// An agent runs for months under the same policy.
func TestPassesLeaveNothingBehind(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Settle()
		before := runtime.NumGoroutine()
		const passes = 10
		begun := w.search.begun
		for range passes {
			w.Hangup <- os.Interrupt
			w.Pass(2 * time.Minute)
		}
		if n := runtime.NumGoroutine() - before; n >= passes || w.search.begun < begun+passes {
			t.Errorf("%d searches left %d goroutines", w.search.begun-begun, n)
		}
	})
}

// The host is the kernel of this network namespace.
func TestConnectionsOfTheKernelAreReadAndDeleted(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	const silent = "table inet silent { chain out { type filter hook output priority 0; drop; }; }"
	nfttest.NFT(t, top.Outside, silent, "-f", "-")
	nfttest.Run(t, top.Node, "*nat\n:IP-MASQ-AGENT -\n-A POSTROUTING -j IP-MASQ-AGENT\n"+
		"-A IP-MASQ-AGENT -d 10.0.0.0/8 -j RETURN\n-A IP-MASQ-AGENT -d 198.18.0.0/15 -j MASQUERADE\nCOMMIT\n",
		"iptables-nft-restore")
	const syn = 0x02
	for _, flow := range []nfttest.Flow{{Proto: nfttest.UDP}, {Proto: nfttest.TCP, Flags: syn}} {
		flow.From = top.Pod
		flow.Dst = netip.MustParseAddrPort("203.0.113.9:53")
		nfttest.MustSend(t, top, flow)
	}
	build := func(cidr string) nft.Ruleset {
		return *nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
			config.Source{Name: "config", Data: []byte("nonMasqueradeCIDRs: [" + cidr + "]\n")}).Ruleset
	}
	prior := build("0.0.0.0/0").Policy
	inForce := build("10.0.0.0/8")
	nfttest.In(t, top.Node, func() (any, error) {
		c := nfnetlink.Dial()
		defer func() { _ = c.Close() }()
		k := Kernel{kernel.New(c)}
		sockets := func() int { // of this network namespace
			return strings.Count(string(nfttest.Must(os.ReadFile("/proc/thread-self/net/netlink"))), "\n")
		}
		before := sockets()
		older, olderErr := k.Older(t.Context(), inForce)
		if n := sockets(); n != before {
			t.Errorf("%d netlink sockets after a search, %d before", n, before)
		}
		stats, statsErr := k.Stats()
		noted, full, noteErr := k.Note(t.Context(), inForce.Policy)
		e, gatherErr := k.Gather(t.Context(), inForce.Policy, conntrack.History{Earlier: noted})
		if len(older) != 1 || stats.Entries != 2 || len(noted) != 2 || full || len(e.Counts) != 1 || e.Counts[0].Stale != 2 {
			t.Errorf("older %v, %+v, noted %v, full %t, %+v", older, stats, noted, full, e)
		}
		none, noneErr := k.Flush(t.Context(), inForce.Policy, inForce.Policy, config.StaleAll)
		udp, udpErr := k.Flush(t.Context(), prior, inForce.Policy, config.StaleUDP)
		all, allErr := k.Flush(t.Context(), prior, inForce.Policy, config.StaleAll)
		if none != 0 || udp != 1 || all != 1 {
			t.Errorf("deleted %d without a change, %d of UDP, then %d", none, udp, all)
		}
		return nil, errors.Join(olderErr, statsErr, noteErr, gatherErr, noneErr, udpErr, allErr)
	})
}
