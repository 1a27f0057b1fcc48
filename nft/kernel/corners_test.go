package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
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
			"type nat hook postrouting priority 50;": "has nat hook postrouting priority 50, not nat hook postrouting " +
				"priority 100",
			"type nat hook output priority 100;": "has nat hook output priority 100, not nat hook postrouting " +
				"priority 100",
			"type filter hook postrouting priority 100;": "has filter hook postrouting priority 100, not nat hook " +
				"postrouting priority 100",
			"": "has no hook, not nat hook postrouting priority 100",
		} {
			t.Run(family+" "+hook, func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				nfttest.NFT(t, ns, fmt.Sprintf("table %s nat { chain POSTROUTING { %s counter comment \"another program's\"; }; }",
					family, hook), "-f", "-")
				says := fmt.Sprintf("table %s nat: chain POSTROUTING %s", family, says)
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

func TestDormantTableWithoutPostroutingIsWokenAndUsed(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for name, text := range map[string]string{
		"empty":         "table ip nat { flags dormant; }",
		"both families": "table ip nat { flags dormant; }; table ip6 nat { flags dormant; }",
		"another program's": "table ip nat { flags dormant; chain PREROUTING { type nat hook prerouting priority -100; " +
			"counter; }; chain other { return; }; }",
		"our chain": "table ip nat { flags dormant; chain IP-MASQ-AGENT { }; }",
		"POSTROUTING too": "table ip nat { flags dormant; chain POSTROUTING { type nat hook postrouting priority 100; " +
			"counter; }; }",
	} {
		for _, from := range cases.Modes() {
			t.Run(name+" from "+string(from), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				k, want := open(t, ns), cases.Load(t, "all-policies").Compile(nft.ModeIPTables)
				if from == nft.ModeNFTables {
					apply(t, k, cases.Load(t, "all-policies").Compile(from), everything)
				}
				nfttest.NFT(t, ns, text, "-f", "-")
				foreign := foreignRules(t, ns)
				diffs := apply(t, k, want, everything)
				if !slices.Contains(diffs, "table ip nat is dormant") {
					t.Errorf("found %q", diffs)
				}
				inSync(t, ns, want)
				if diff := cmp.Diff(foreign, foreignRules(t, ns)); diff != "" {
					t.Errorf("foreign rules (-before +after):\n%s", diff)
				}
			})
		}
	}
}

// The jump leads to our chain again, and nothing to the one that was ours.
func TestRenamedChainIsRestored(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	was := cases.Load(t, "to-ports-force")
	for name, want := range map[string]nft.Ruleset{
		"the same config": was.Compile(nft.ModeIPTables),
		"another config":  cases.Load(t, "sources-only").Compile(nft.ModeIPTables),
		"the new name":    nft.Compile(was.Config, nft.Options{Layout: xtables.Layout{Name: "RENAMED"}}),
	} {
		for _, depth := range []layout.Depth{layout.Ours, layout.Everything} {
			if want.Chain() == "RENAMED" && depth == layout.Ours {
				continue // the agent reads everything when its settings change
			}
			t.Run(fmt.Sprintf("%s, depth %d", name, depth), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				loadForeign(t, ns)
				k := open(t, ns)
				apply(t, k, was.Compile(nft.ModeIPTables), layout.Ours)
				iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-d", "192.0.2.99", "-j", "ACCEPT")
				before := foreignRules(t, ns)
				iptables(t, ns, nfnetlink.IPv4, "-E", cases.DefaultChain, "RENAMED")
				if len(apply(t, k, want, depth)) == 0 {
					t.Error("nothing found")
				}
				inSync(t, ns, want)
				rules := iptables(t, ns, nfnetlink.IPv4, "-S", xtables.Postrouting)
				if strings.Contains(rules, "-j RENAMED") != (want.Chain() == "RENAMED") {
					t.Errorf("the jumps:\n%s", rules)
				}
				after := foreignRules(t, ns)
				for chain := range before {
					if diff := cmp.Diff(before[chain], after[chain]); diff != "" &&
						(want.Chain() != "RENAMED" || !strings.HasSuffix(chain, xtables.Postrouting)) {
						t.Errorf("%s (-before +after):\n%s", chain, diff)
					}
				}
			})
		}
	}
}

// The shared table is deleted only if nothing is in it but ours and an empty POSTROUTING.
func TestCleanupDeletesTheSharedTableOnlyIfItIsEmpty(t *testing.T) {
	nfttest.Require(t, "nft")
	want := cases.Load(t, "sources-only").Compile(nft.ModeIPTables)
	for what, others := range map[string]string{
		"nothing": "", "a chain": "chain FOREIGN { }",
		"a base chain":       "chain PREROUTING { type nat hook prerouting priority -100; }",
		"a chain with rules": "chain FOREIGN { accept; }", "a set": "set s { type ipv4_addr; }", "a counter": "counter c { }",
		"a map": "map m { type ipv4_addr : verdict; }", "a rule": "chain POSTROUTING { accept; }",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k := open(t, ns)
			apply(t, k, want, layout.Ours)
			before := "table ip nat { " + others + "; }"
			nfttest.NFT(t, ns, before, "-f", "-")
			if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) == 0 {
				t.Errorf("removed %q, %v", removed, err)
			}
			_, err := connect(t, ns).Table(nfnetlink.IPv4, xtables.NATTable)
			if nfnetlink.IsNotExist(err) != (others == "") {
				t.Errorf("reading the table: %v", err)
			}
			if others == "" {
				return
			}
			other := nfttest.NewNS(t, "expected")
			post := "chain POSTROUTING { type nat hook postrouting priority srcnat; }"
			nfttest.NFT(t, other, "table ip nat { "+post+"; }; "+before, "-f", "-")
			if diff := cmp.Diff(chainsOf(t, other), chainsOf(t, ns)); diff != "" {
				t.Errorf("what is left (-want +got):\n%s", diff)
			}
		})
	}
}

// Without IPv6, our rules of IPv6 are reported and removed, and nobody else's.
func TestRulesOfAnUnwantedFamilyAreReportedAndRemoved(t *testing.T) {
	nfttest.Require(t, "nft", "iptables-nft")
	both, v4 := config.Default(config.Defaults{EnableIPv6: true}), config.Default(config.Defaults{})
	ns := nfttest.NewNS(t, "node")
	k, want := open(t, ns), xtOf(v4)
	apply(t, k, xtOf(both), layout.Ours)
	iptables(t, ns, nfnetlink.IPv6, "-N", "FOREIGN")
	iptables(t, ns, nfnetlink.IPv6, "-A", "FOREIGN", "-d", "2001:db8::/32", "-j", "RETURN")
	iptables(t, ns, nfnetlink.IPv6, "-A", xtables.Postrouting, "-j", "FOREIGN")
	found := []string{
		"table ip nat: chain IP-MASQ-AGENT has the hash of another policy", "leftover chain IP-MASQ-AGENT in table ip6 nat",
	}
	diffs, err := k.Diff(t.Context(), want, layout.Ours)
	if diff := cmp.Diff(found, diffs); err != nil || diff != "" {
		t.Errorf("Diff: %v (-want +got):\n%s", err, diff)
	}
	if diff := cmp.Diff(found, apply(t, k, want, layout.Ours)); diff != "" {
		t.Errorf("Apply (-want +got):\n%s", diff)
	}
	inSync(t, ns, want)
	const left = "-N FOREIGN\n-A POSTROUTING -j FOREIGN\n-A FOREIGN -d 2001:db8::/32 -j RETURN\n"
	if got := iptables(t, ns, nfnetlink.IPv6, "-S"); !strings.HasSuffix(got, left) || strings.Contains(got, "MASQ") {
		t.Errorf("left in ip6 nat:\n%s", got)
	}
}

// chainsOf returns the lines of the ruleset in no order.
func chainsOf(t *testing.T, ns *nfttest.NS) []string {
	t.Helper()
	lines := strings.Split(nfttest.NFT(t, ns, "", "-s", "list", "ruleset"), "\n")
	slices.Sort(lines)
	return lines
}

// The kernel does not delete a chain to which another program's rule or map
// refers. An empty one has no effect.
func TestChainInUseByOthersIsEmptiedWithAReason(t *testing.T) {
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	with := cases.Load(t, "sources-only").Compile(nft.ModeIPTables)
	nf := cases.Load(t, "default").Compile(nft.ModeNFTables)
	further, verdicts := cases.DefaultChain+"-SRC",
		"add map ip nat verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : jump %s }; }"
	for _, tt := range []struct {
		name   string
		keeps  string // a chain
		by     string
		before nft.Ruleset // without a chain: an older agent's rules
		do     func(context.Context, *Kernel) ([]string, error)
		says   string
	}{
		{
			"cleanup", further, "add rule ip nat FOREIGN ip daddr 192.0.2.1 jump %s", with, cleansUp(Ours),
			"chain FOREIGN: ip daddr 192.0.2.1 jump IP-MASQ-AGENT-SRC",
		},
		{
			"cleanup of the chain itself", cases.DefaultChain, "add rule ip nat FOREIGN goto %s", with, cleansUp(Ours),
			"chain FOREIGN: goto IP-MASQ-AGENT",
		},
		{"cleanup with a map", cases.DefaultChain, verdicts, with, cleansUp(Ours), "because of another program's map"},
		{
			"take-over", "IP-MASQ", "add rule ip nat FOREIGN goto %s",
			nft.Ruleset{},
			applies(nf, layout.TakeOver),
			"chain FOREIGN: goto IP-MASQ",
		},
		{
			"take-over with a map", "IP-MASQ", verdicts,
			nft.Ruleset{},
			applies(nf, layout.TakeOver),
			"because of another program's map",
		},
		{
			"other mode", cases.DefaultChain, "add rule ip nat FOREIGN goto %s", with, applies(nf, layout.Everything),
			"chain FOREIGN: goto IP-MASQ-AGENT",
		},
		{
			"cleanup of an older agent", "IP-MASQ", "add rule ip nat FOREIGN counter jump %s",
			nft.Ruleset{},
			cleansUp(WithLegacy), "chain FOREIGN: counter jump IP-MASQ",
		},
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

// Cleanup finds our chains under whatever name, and one whose jump is gone or was never written.
// Its jump leads to it, so that the other rules of the table need not be read.
func TestRenamedChainGoesWithItsMode(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	ns, c := nfttest.NewNS(t, "node"), cases.Load(t, "all-policies")
	k := open(t, ns)
	apply(t, k, c.Compile(nft.ModeIPTables), layout.Ours)
	nfttest.NFT(t, ns, "", "rename", "chain", "ip", "nat", cases.DefaultChain, "renamed")
	// The same jump once more.
	nfttest.Run(t, ns, "", "iptables-nft", "-t", "nat", "-A", xtables.Postrouting, "-m", "comment", "--comment",
		"ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom "+
			cases.DefaultChain+" chain", "-j", "renamed")
	diffs := apply(t, k, cases.Load(t, "default").Compile(nft.ModeNFTables), layout.Everything)
	if told := strings.Count(strings.Join(diffs, "\n"), "chain renamed in"); told != 1 {
		t.Errorf("the chain is named %d times: %q", told, diffs)
	}
	rules := nfttest.ListRuleset(t, ns)
	if strings.Contains(rules, "renamed") || strings.Contains(rules, "jump") {
		t.Errorf("left are\n%s", rules)
	}
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
		names := func(ns *nfttest.NS) (all []string) {
			for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
				chains, err := connect(t, ns).Chains(f)
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range chains {
					if c.Name != xtables.Postrouting {
						all = append(all, fmt.Sprint(f, " ", c.Table, " ", c.Name))
					}
				}
			}
			return all
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
				before, k := names(ns), open(t, ns)
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
				for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
					err := connect(t, ns).EachRule(f, xtables.NATTable, "", func(r nfnetlink.Rule) error {
						if bytes.Contains(r.UserData, []byte(nft.TableName)) {
							t.Errorf("a rule of ours is left in %s", r.Chain)
						}
						return nil
					})
					if err != nil && !nfnetlink.IsNotExist(err) {
						t.Error(err)
					}
				}
				if diff := cmp.Diff(before, names(ns)); diff != "" {
					t.Errorf("the chains (-before +after):\n%s", diff)
				}
			})
		}
	}
}
