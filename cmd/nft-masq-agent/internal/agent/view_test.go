package agent

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
)

const snat = "snatAddresses: [198.51.100.11, 198.51.100.64/29]\n"

func TestEffectOfAnApplyIsKnownFromTheViewBeforeIt(t *testing.T) {
	one, other := rulesetOf("10.1.0.0/16"), rulesetOf("10.2.0.0/16")
	source := config.Source{Name: "config", Data: []byte(snat)}
	away := nft.Build(config.Defaults{}, testSettings().NFT, source).Ruleset
	here := away.WithAddresses([]netip.Addr{netip.MustParseAddr("198.51.100.11")})
	differences := func(n int, tookOver ...string) kernel.Applied {
		return kernel.Applied{Differences: make([]string, n), TookOver: tookOver, Generation: 7}
	}
	const again, others = "rules restored, differences: 2", "source addresses replaced by those that this node has"
	accepted := view{installed: one, installedAccepted: true}
	failed := func(r *nft.Ruleset) view { return view{installed: r, failure: unix.EPERM} }
	start := time.Now()
	for name, tt := range map[string]struct {
		before  view
		want    *nft.Ruleset
		applied kernel.Applied
		cause   cause
		what    string
	}{
		"nothing differs":     {view{installed: one}, one, differences(0), noCause, ""},
		"first rules":         {view{}, one, differences(3), policyChanged, "rules installed"},
		"rules in place":      {view{}, one, differences(0), noCause, "the rules were already in place"},
		"another program":     {view{installed: one}, one, differences(2), changedByOthers, again},
		"and an older agent":  {accepted, one, differences(2, "a"), changedByOthers, again},
		"an older agent":      {accepted, one, differences(1, "a"), onlyOlderAgents, "differences removed: 1"},
		"the first take-over": {view{installed: one}, one, differences(1, "a"), policyChanged, "differences removed: 1"},
		"after a failure":     {failed(one), one, differences(2), policyChanged, "differences removed: 2"},
		"another address":     {view{installed: away}, &here, differences(2), addressesChanged, others},
		"it is gone":          {failed(&here), away, differences(2), addressesChanged, others},
		"the address stays":   {view{installed: &here}, &here, differences(2), changedByOthers, again},
		"another policy": {
			view{installed: other},
			one, differences(1), policyChanged,
			"policy " + other.Hash() + " replaced, entries added: 1, removed: 1",
		},
		"a policy with another": {
			view{installed: one},
			&here, differences(2), policyChanged,
			"policy " + one.Hash() + " replaced, entries added: 5, removed: 1",
		},
	} {
		v := tt.before
		v.policy.want, v.history.Since, v.attempt.reason, v.tries = tt.want, start, onResync, 3
		got := v.withApplied(tt.applied, start.Add(time.Second))
		if got.attempt.cause != tt.cause || got.history.Change != tt.what {
			t.Errorf("%s: cause %d, %q", name, got.attempt.cause, got.history.Change)
		}
		if !got.inForce() || got.generation != 7 || got.failure != nil || got.tries > 0 || got.ready() == nil {
			t.Errorf("%s: in force %t, %v, ready %v before any config was read", name, got.inForce(), got.failure, got.ready())
		}
		byOthers := got.history.Reason == "changed by another program"
		if tt.what != "" && byOthers != (tt.cause == changedByOthers) {
			t.Errorf("%s: because of %s", name, got.history.Reason)
		}
		since := start
		if v.hash() != tt.want.Hash() {
			since = start.Add(time.Second)
		}
		if !got.history.Since.Equal(since) || (got.repairs == 1) != (tt.cause == changedByOthers) ||
			(got.changes == 1) != (tt.what != "") || tt.what != "" && got.replaced != v.installed {
			t.Errorf("%s: since %s, %d repairs, %d changes", name, got.history.Since.Sub(start), got.repairs, got.changes)
		}
	}
}
