package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// iptables does not use a POSTROUTING with another hook than its own, and we do
// not delete another program's chain.
func TestPostroutingWithAnotherHookIsReported(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	want, nf := cases.Load(t, "both-families").Compile(nft.ModeIPTables),
		cases.Load(t, "both-families").Compile(nft.ModeNFTables)
	for _, family := range []string{"ip", "ip6"} {
		for hook, says := range map[string]string{
			"type nat hook postrouting priority 50;":     "nat hook postrouting priority 50",
			"type nat hook output priority 100;":         "nat hook output priority 100",
			"type filter hook postrouting priority 100;": "filter hook postrouting priority 100",
			"": "no hook",
		} {
			t.Run(family+" "+hook, func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				nfttest.NFT(t, ns, fmt.Sprintf("table %s nat { chain POSTROUTING { %s counter comment \"another program's\"; }; }",
					family, hook), "-f", "-")
				says := fmt.Sprintf("table %s nat: chain POSTROUTING has %s, not nat hook postrouting priority 100", family, says)
				k := open(t, ns)
				apply(t, k, nf, everything) // unrelated to the other mode
				before := nfttest.ListRuleset(t, ns)
				diffs, err := k.Diff(t.Context(), want, layout.Ours)
				if err != nil || !slices.Contains(diffs, says) {
					t.Errorf("Diff returned %q, %v, want %q", diffs, err, says)
				}
				for range 2 {
					a, err := k.Apply(t.Context(), want, layout.Everything)
					if !errors.Is(err, nft.ErrForeignPostrouting) || !strings.Contains(err.Error(), says) ||
						!strings.Contains(err.Error(), fmt.Sprintf("nft delete chain %s nat POSTROUTING", family)) {
						t.Errorf("Apply returned %v, error %v", a, err)
					}
				}
				if diff := cmp.Diff(before, nfttest.ListRuleset(t, ns)); diff != "" {
					t.Errorf("the kernel (-before +after):\n%s", diff)
				}
				nfttest.NFT(t, ns, fmt.Sprintf("flush chain %s nat POSTROUTING; delete chain %[1]s nat POSTROUTING", family), "-f",
					"-")
				apply(t, k, want, everything)
				inSync(t, ns, want)
			})
		}
	}
}

// The kernel does not delete a chain to which another program's rule or map
// refers. An empty one has no effect.
func TestChainInUseByOthersIsEmptiedWithAReason(t *testing.T) {
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	with, none := cases.Load(t, "sources-only").Compile(nft.ModeIPTables), nft.Ruleset{} // none: an older agent's rules
	nf := cases.Load(t, "default").Compile(nft.ModeNFTables)
	takesOver, otherMode := applies(nf, layout.TakeOver), applies(nf, layout.Everything)
	const (
		ours, theirs = cases.DefaultChain, "IP-MASQ"
		jumpsTo      = "add rule ip nat FOREIGN goto %s"
		mapped       = "add map ip nat verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : jump %s }; }"
		byAMap       = "because of another program's map"
	)
	for _, tt := range []struct {
		name   string
		keeps  string // a chain
		by     string
		before nft.Ruleset
		do     func(context.Context, *Kernel) ([]string, error)
		says   string
	}{
		{
			"cleanup", ours + "-SRC", "add rule ip nat FOREIGN ip daddr 192.0.2.1 jump %s", with, cleansUp(Ours),
			"chain FOREIGN: ip daddr 192.0.2.1 jump IP-MASQ-AGENT-SRC",
		},
		{"cleanup of the chain itself", ours, jumpsTo, with, cleansUp(Ours), "chain FOREIGN: goto IP-MASQ-AGENT"},
		{"cleanup with a map", ours, mapped, with, cleansUp(Ours), byAMap},
		{"take-over", theirs, jumpsTo, none, takesOver, "chain FOREIGN: goto IP-MASQ"},
		{"take-over with a map", theirs, mapped, none, takesOver, byAMap},
		{"other mode", ours, jumpsTo, with, otherMode, "chain FOREIGN: goto IP-MASQ-AGENT"},
		{"cleanup of an older agent", theirs, jumpsTo, none, cleansUp(WithLegacy), "chain FOREIGN: goto IP-MASQ"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k := open(t, ns)
			if tt.before.Chain() == "" {
				loadOlder(t, "ip-masq-gke").install(t, ns, nil)
			} else {
				apply(t, k, tt.before, layout.Ours)
			}
			nfttest.NFT(t, ns, "add chain ip nat FOREIGN; "+fmt.Sprintf(tt.by, tt.keeps), "-f", "-")
			removed, err := tt.do(t.Context(), k)
			if err != nil || !strings.Contains(strings.Join(removed, "\n"), tt.says) {
				t.Errorf("removed %q, %v, want %q", removed, err, tt.says)
			}
			c := connect(t, ns)
			for _, chain := range []string{tt.keeps, xtables.Postrouting} {
				if rules := rulesOf(t, c, nfnetlink.IPv4, xtables.NATTable, chain); len(rules) > 0 {
					t.Errorf("chain %s has %d rules", chain, len(rules))
				}
			}
			if again, err := tt.do(t.Context(), k); err != nil || len(again) > 0 {
				t.Errorf("a second time: %q, %v", again, err)
			}
		})
	}
}

func applies(want nft.Ruleset, depth layout.Depth) func(context.Context, *Kernel) ([]string, error) {
	return func(ctx context.Context, k *Kernel) ([]string, error) {
		a, err := k.Apply(ctx, want, depth)
		return append(a.Removed, a.Differences...), err
	}
}

func cleansUp(what Removal) func(context.Context, *Kernel) ([]string, error) {
	return func(ctx context.Context, k *Kernel) ([]string, error) { return k.Cleanup(ctx, what) }
}

func TestCleanupRemovesOurChainsWithoutTheirNamesAndJumps(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	for _, name := range []string{"all-policies", "default", "to-ports-force"}[:nfttest.Rounds(1, 3, 3)] {
		want := cases.Load(t, name).Compile(nft.ModeIPTables)
		chains := func(change string) (scripts []string) {
			for _, f := range want.Tables {
				for _, c := range f.Chains {
					if c.Name != xtables.Postrouting {
						scripts = append(scripts, fmt.Sprintf(change, f.Family, c.Name))
					}
				}
			}
			return scripts
		}
		for what, scripts := range map[string][]string{
			"renamed":                    chains("rename chain %s nat %[2]s renamed-%[2]s"),
			"renamed to a part of ours":  {"rename chain ip nat " + cases.DefaultChain + " " + cases.DefaultChain + "-SRC2"},
			"renamed, without the jumps": append(chains("rename chain %s nat %[2]s x%[2]s"), "flush chain ip nat POSTROUTING"),
			"without the jump":           {"flush chain ip nat POSTROUTING"},
		} {
			t.Run(name+", "+what, func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				loadForeign(t, ns)
				others := func() []string { // POSTROUTING may have been flushed
					return slices.DeleteFunc(notOurs(t, ns, ""), func(line string) bool {
						return strings.HasPrefix(line, "ip nat POSTROUTING")
					})
				}
				before, k := others(), open(t, ns)
				apply(t, k, want, layout.Ours)
				for _, script := range scripts {
					nfttest.NFT(t, ns, script, "-f", "-")
				}
				if found, err := k.Removable(t.Context(), Ours); err != nil || len(found) == 0 {
					t.Errorf("found %q, %v", found, err)
				}
				if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) == 0 {
					t.Errorf("removed %q, %v", removed, err)
				}
				if diff := cmp.Diff(before, others()); diff != "" {
					t.Errorf("chains and rules (-before +after):\n%s", diff)
				}
			})
		}
	}
}
