package observe

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	captured "go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// events returns an event and a field of each line about a pass.
func events(logs *captured.ObservedLogs) (all []string) {
	for _, line := range logs.All() {
		f := line.ContextMap()
		switch f["event"] {
		case "stale_connections_deleting":
			all = append(all, fmt.Sprint("deleting ", f["connections"], " of ", f["protocols"]))
		case "stale_connections_deleted":
			all = append(all, fmt.Sprint("deleted ", f["connections"], ", complete: ", f["complete"]))
		case "stale_connections_kept":
			all = append(all, fmt.Sprint("failed: ", f["error"]))
		case "stale_connections_spared":
			all = append(all, fmt.Sprint("spared: ", f["reason"]))
		}
	}
	return all
}

func TestPassIsLoggedAtItsStartAndItsEndAndFailuresAreRetried(t *testing.T) {
	broken := errors.New("broken")
	type step struct {
		listed  int // -1: they are not known
		deleted int
		err     error // [context.Canceled]: the policy changes
	}
	for _, tt := range []struct {
		name   string
		which  config.Stale
		spared []string
		steps  []step
		waits  int // for a retry
		want   []string
	}{
		{name: "keep", which: config.StaleKeep},
		{name: "none is stale", which: config.StaleAll, steps: []step{{}}},
		{
			name: "some", which: config.StaleUDP, steps: []step{{listed: 5, deleted: 4}},
			want: []string{"deleting 5 of udp", "deleted 4, complete: true"},
		},
		{
			name: "failures", which: config.StaleAll, waits: 4,
			steps: []step{{-1, 0, broken}, {-1, 0, broken}, {5, 1, broken}, {-1, 3, unix.EPERM}, {-1, 5, nil}},
			want: []string{
				"failed: broken", "deleting 5 of all", "failed: operation not permitted", "deleted 5, complete: true",
			},
		},
		{
			name: "another policy", which: config.StaleAll, steps: []step{{listed: 5, deleted: 1, err: context.Canceled}},
			want: []string{"deleting 5 of all", "deleted 1, complete: false"},
		},
		{name: "another policy at once", which: config.StaleAll, steps: []step{{listed: -1, err: context.Canceled}}},
		{
			name: "spared", which: config.StaleAll, spared: []string{"theirs"}, steps: []step{{}},
			want: []string{"spared: theirs"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				k := &world{flush: func(_ nft.Ruleset, which config.Stale, listed func(int, *conntrack.Judge)) Flush {
					return func(context.Context) (int, error) {
						s := tt.steps[0]
						tt.steps = tt.steps[1:]
						if s.listed >= 0 {
							listed(s.listed, &conntrack.Judge{Evidence: conntrack.Evidence{Spared: tt.spared}})
						}
						if errors.Is(s.err, context.Canceled) {
							cancel()
						}
						return s.deleted, s.err
					}
				}}
				core, logs := captured.New(zap.InfoLevel)
				start := time.Now()
				(&connections{Agent: agent.New(agent.Inputs{}, k, agent.Settings{}, zap.New(core)), host: k}).flush(
					ctx,
					nft.Ruleset{},
					tt.which,
				)
				if diff := cmp.Diff(tt.want, events(logs)); diff != "" || len(tt.steps) > 0 {
					t.Errorf("%d steps are left, (-want +got):\n%s", len(tt.steps), diff)
				}
				least := time.Duration(0)
				for n := range tt.waits {
					least += time.Second << n * 9 / 10
				}
				if took := time.Since(start); took < least || took > least*11/9 {
					t.Errorf("it took %s, at least %s were expected", took, least)
				}
			})
		})
	}
}

// A pass that did not end would delete connections that the policy in force allows.
func TestPassEndsAtOnceWithItsPolicy(t *testing.T) {
	staleFile := func(stale, cidr string) agent.Files {
		f := file(cidr)
		f.Sources[0].Data = append(f.Sources[0].Data, "staleConnections: "+stale+"\n"...)
		return f
	}
	const begun, ended, other = "deleting 5 of all", "deleted 1, complete: false", "deleting 5 of udp"
	for name, tt := range map[string]struct {
		event   func(*world)
		want    []string
		counted int64 // stale connections
	}{
		"another policy": {func(w *world) {
			w.files <- staleFile("udp", "10.0.0.0/9")
		}, []string{begun, ended, other}, 0},
		"another policy, while it is written": {func(w *world) {
			w.cost = time.Hour
			w.files <- staleFile("udp", "10.0.0.0/9")
		}, []string{begun, ended}, 0},
		"a refused policy": {func(w *world) {
			w.refuse(unix.ENOMEM)
			w.files <- staleFile("all", "10.0.0.0/9")
		}, []string{begun, ended}, 0},
		"a refused policy, and the same again": {func(w *world) {
			w.refuse(unix.ENOMEM)
			w.gets(staleFile("all", "10.0.0.0/9"))
			w.refuse(nil)
			w.files <- staleFile("all", "10.0.0.0/8")
		}, []string{begun, ended, begun}, 0},
		"keep": {func(w *world) { w.files <- staleFile("keep", "10.0.0.0/8") }, []string{begun, ended}, 1},
		"fewer protocols": {func(w *world) {
			w.files <- staleFile("udp", "10.0.0.0/8")
		}, []string{begun, ended, other}, 0},
		"a repair": {func(w *world) {
			w.mu.Lock()
			w.held = "tampered"
			w.mu.Unlock()
			w.hangup <- unix.SIGHUP
		}, []string{begun, ended, begun}, 0},
		"rules are not read":  {func(w *world) { w.refuse(unix.EPERM); w.hangup <- unix.SIGHUP }, []string{begun, ended}, 0},
		"the same policy":     {func(w *world) { w.files <- staleFile("all", "10.0.0.0/8, 10.0.0.0/8") }, []string{begun}, 0},
		"a rejected config":   {func(w *world) { w.files <- staleFile("never", "10.0.0.0/9") }, []string{begun}, 0},
		"resyncs for an hour": {func(*world) { time.Sleep(time.Hour) }, []string{begun}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.flush = func(_ nft.Ruleset, _ config.Stale, listed func(int, *conntrack.Judge)) Flush {
					return func(ctx context.Context) (int, error) {
						listed(5, &conntrack.Judge{})
						<-ctx.Done()
						return 1, ctx.Err()
					}
				}
				w.gets(staleFile("all", "10.0.0.0/8"))
				if got := events(w.logs); !slices.Equal(got, []string{begun}) {
					t.Fatalf("%q", got)
				}
				tt.event(w)
				synctest.Wait()
				if diff := cmp.Diff(tt.want, events(w.logs)); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				// A policy that has ended counts nothing.
				if n := w.recounts.Load(); n != tt.counted {
					t.Errorf("counted %d times", n)
				}
			})
		})
	}
}
