package kernel

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/xtables"
)

// sameWords are the cases of olderTexts whose rules equal those of mode iptables-nft.
var sameWords = []string{"ip-masq-agent-v0.3", "ip-masq-agent-v2.0.0"}

func TestOlderAgentsRulesWithOurTextAreNotOurs(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	for _, name := range sameWords {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			agent, ns := loadOlder(t, name), nfttest.NewNS(t, "node")
			loadForeign(t, ns)
			empty := notOurs(t, ns, "")
			agent.install(t, ns, nil)
			before, k := notOurs(t, ns, ""), open(t, ns)
			stay := func(when string) {
				t.Helper()
				if diff := cmp.Diff(before, notOurs(t, ns, "")); diff != "" {
					t.Errorf("%s (-before +after):\n%s", when, diff)
				}
			}
			if _, found, err := k.Installed(t.Context()); found || err != nil {
				t.Errorf("a previous run left them: %t, %v", found, err)
			}
			native := nft.Compile(agent.config, nft.Options{Layout: native.Layout{}})
			a, err := k.Apply(t.Context(), native, layout.Everything)
			if err != nil || len(a.Removed)+len(a.TookOver) > 0 {
				t.Errorf("%+v, %v", a, err)
			}
			stay("after Apply")
			if decides, err := k.OlderDecides(t.Context()); !decides || err != nil {
				t.Errorf("the older agent decides: %t, %v", decides, err)
			}
			if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) != 1 {
				t.Errorf("removed %q, %v", removed, err)
			}
			stay("after Cleanup")
			apply(t, k, native, layout.TakeOver)
			if diff := cmp.Diff(empty, notOurs(t, ns, "")); diff != "" {
				t.Errorf("after the take-over:\n%s", diff)
			}
		})
	}
}

func TestOlderAgentThatRewritesOurChainOwnsIt(t *testing.T) {
	nfttest.Require(t, "iptables-nft-restore")
	ns, agent := nfttest.NewNS(t, "node"), loadOlder(t, "ip-masq-agent-v2.0.0")
	agent.config.EnableIPv6 = false
	want := nft.Compile(agent.config, nft.Options{Layout: xtables.Layout{Name: agent.chain}})
	k := open(t, ns)
	apply(t, k, want, layout.Ours)
	if installed, err := k.Removable(t.Context(), Ours); err != nil || len(installed) != 1 {
		t.Errorf("installed are %q, %v", installed, err)
	}
	// It keeps an existing jump.
	text, _, _ := strings.Cut(agent.rules[nfnetlink.IPv4], "-A POSTROUTING")
	_, rules, _ := strings.Cut(agent.rules[nfnetlink.IPv4], " -j "+agent.chain+"\n")
	nfttest.Run(t, ns, text+rules, "iptables-nft-restore", "--noflush")
	if diffs := apply(t, k, want, everything); len(diffs) > 0 {
		t.Errorf("a running agent undid %q", diffs)
	}
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) > 0 {
		t.Errorf("removed %q, %v", removed, err)
	}
	removed, err := k.Cleanup(t.Context(), WithLegacy)
	name := "another agent's chain " + agent.chain + " in table ip nat: "
	if err != nil || len(removed) != 1 || !strings.HasPrefix(removed[0], name) {
		t.Errorf("removed with those of older agents %q, %v", removed, err)
	}
}

// Rules that iptables-restore wrote have our text, but not our signature. A running agent leaves them, and
// the next one writes them again.
func TestRestoredRulesAreSignedAtTheStart(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "iptables-nft-save")
	ns := nfttest.NewNS(t, "node")
	loadForeign(t, ns)
	want, k := xtOf(config.Default(config.Defaults{})), open(t, ns)
	apply(t, k, want, layout.Ours)
	nfttest.Run(t, ns, nfttest.Save(t, ns, "iptables-nft-save", "nat"), "iptables-nft-restore")
	saved := nfttest.Save(t, ns, "iptables-nft-save", "nat")
	if diffs := apply(t, k, want, everything); len(diffs) > 0 {
		t.Errorf("a running agent undid %q", diffs)
	}
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) > 0 {
		t.Errorf("unsigned rules were removed: %q, %v", removed, err)
	}
	if diffs := apply(t, open(t, ns), want, everything); len(diffs) == 0 {
		t.Error("the next agent did not sign them")
	}
	inSync(t, ns, want)
	if diff := cmp.Diff(saved, nfttest.Save(t, ns, "iptables-nft-save", "nat")); diff != "" {
		t.Errorf("rules (-saved +signed):\n%s", diff)
	}
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) != 1 {
		t.Errorf("removed %q, %v", removed, err)
	}
}

// Rules to which nothing leads any more are not those of a previous run that decide.
func TestRulesWithoutTheirJumpAreNotInstalled(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	want, k := xtOf(config.Default(config.Defaults{})), open(t, ns)
	apply(t, k, want, layout.Ours)
	for _, jump := range []bool{true, false} {
		if got, is, err := k.Installed(t.Context()); err != nil || is != jump || is && got.Hash != want.Hash() {
			t.Errorf("with a jump %t: installed %t, %+v, %v", jump, is, got, err)
		}
		iptables(t, ns, nfnetlink.IPv4, "-F", xtables.Postrouting)
	}
}

func TestOlderAgentsChainInADisabledFamilyStaysAndIsReported(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore")
	for _, name := range []string{"ip-masq-agent-v2.0.0", "ip-masq-agent-v2.9"} {
		ns, agent := nfttest.NewNS(t, "node"), loadOlder(t, name)
		agent.withIPv6()
		agent.install(t, ns, nil)
		agent.config.EnableIPv6 = false
		want := nft.Compile(agent.config, nft.Options{Layout: xtables.Layout{Name: agent.chain}})
		k := open(t, ns)
		six := nfttest.Save(t, ns, "ip6tables-nft-save", "nat")
		apply(t, k, want, layout.Everything)
		if diff := cmp.Diff(six, nfttest.Save(t, ns, "ip6tables-nft-save", "nat")); diff != "" {
			t.Errorf("%s: IPv6 (-before +after):\n%s", name, diff)
		}
		if found, err := k.Older(t.Context(), want); err != nil || len(found) != 1 || found[0].Family != nfnetlink.IPv6 {
			t.Errorf("%s: %v, %v", name, found, err)
		}
		if a, err := k.Apply(t.Context(), want, layout.TakeOver); err != nil || len(a.TookOver) != 1 {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}
