package observe

import (
	"context"
	"errors"
	"fmt"
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
