package kernel

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// commits returns what another program does that commits to its own table.
func commits(t *testing.T, ns *nfttest.NS) func() {
	t.Helper()
	other := connect(t, ns)
	return func() {
		var b nfnetlink.Batch
		b.AddTable(nfnetlink.Inet, "other")
		b.DelTable(nfnetlink.Inet, "other")
		if err := other.Commit(&b, 0); err != nil {
			t.Error(err)
		}
	}
}

// Handles begin again when a table is created again: a rule of another program then has
// the one that was to be deleted.
func TestRulesThatTookTheHandlesOfOlderAgentsRulesStay(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	agent := loadOlder(t, "ip-masq-agent-v2.9")
	agent.withIPv6()
	takesOver := func(mode nft.Mode) func(context.Context, *Kernel) ([]string, error) {
		return applies(nft.Compile(agent.config, nft.Options{Layout: layouts.Of(mode, "TAKES-OVER")}), layout.TakeOver)
	}
	// The older agent is about to come back: its chain exists, and other rules.
	var reload strings.Builder
	for _, f := range []string{"ip", "ip6"} {
		fmt.Fprintf(&reload, "delete table %s nat; table %[1]s nat { chain IP-MASQ-AGENT { }; chain POSTROUTING { type "+
			"nat hook postrouting priority 100; ", f)
		for i := range 40 {
			fmt.Fprintf(&reload, "meta mark %d accept; ", i)
		}
		reload.WriteString("}; }\n")
	}
	for _, tt := range []struct {
		name         string
		transactions int // the last one deletes
		do           func(context.Context, *Kernel) ([]string, error)
	}{
		{"take-over in mode nftables", 2, takesOver(nft.ModeNFTables)},
		{"take-over in mode iptables-nft", 1, takesOver(nft.ModeIPTables)},
		{"cleanup --legacy", 1, cleansUp(WithLegacy)},
		{"cleanup --legacy-only", 1, cleansUp(LegacyOnly)},
	} {
		for _, reloads := range []bool{true, false} { // or else the control
			t.Run(fmt.Sprint(tt.name, ", reloads ", reloads), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				agent.install(t, ns, nil)
				others := func() []string {
					return slices.DeleteFunc(notOurs(t, ns, "TAKES-OVER"), func(line string) bool {
						return strings.Contains(line, cases.DefaultChain)
					})
				}
				var before []string
				n := 0
				k := nextTo(t, ns, func(transaction) {
					if n++; n == tt.transactions && reloads {
						nfttest.NFT(t, ns, reload.String(), "-f", "-")
						before = others()
					}
				})
				if _, err := tt.do(t.Context(), k); err != nil || n < tt.transactions {
					t.Errorf("%v; %d transactions", err, n)
				}
				if diff := cmp.Diff(before, others()); diff != "" {
					t.Errorf("what is not ours (-reloaded +left):\n%s", diff)
				}
			})
		}
	}
}

// A variant of our jump is deleted by its handle, which a rule of another program may have by then.
func TestRulesThatTookTheHandlesOfJumpsStay(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	want := xtOf(config.Default(config.Defaults{}))
	apply(t, open(t, ns), want, layout.Ours)
	iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-j", cases.DefaultChain)
	reload := "delete table ip nat; table ip nat { chain POSTROUTING { type nat hook postrouting priority 100; " +
		strings.Repeat("meta mark 7 accept; ", 40) + "}; }"
	once := sync.OnceFunc(func() { nfttest.NFT(t, ns, reload, "-f", "-") })
	k := nextTo(t, ns, func(transaction) { once() })
	if diffs := apply(t, k, want, layout.Ours); len(diffs) == 0 {
		t.Error("nothing was found")
	}
	inSync(t, ns, want)
	if left := strings.Count(nfttest.ListRuleset(t, ns), "meta mark 0x00000007"); left != 40 {
		t.Errorf("%d of 40 rules of another program are left", left)
	}
}

// What another agent of ours writes while cleanup plans goes, too.
func TestCleanupRemovesWhatComesBetweenItsAttempts(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	second := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: layouts.Of(nft.ModeIPTables, "SECOND")})
	apply(t, open(t, ns), xtOf(config.Default(config.Defaults{})), layout.Ours)
	once := sync.OnceFunc(func() { apply(t, open(t, ns), second, layout.Ours) })
	k := nextTo(t, ns, func(transaction) { once() })
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) == 0 {
		t.Errorf("removed %q, %v", removed, err)
	}
	if left := nfttest.ListRuleset(t, ns); strings.Contains(left, "SECOND") || strings.Contains(left, cases.DefaultChain) {
		t.Errorf("left are\n%s", left)
	}
}
