package kernel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// The cases of testdata/foreign with rules of an iptables-based agent, one for
// each text that one of its versions wrote.
var olderTexts = []string{
	"ip-masq-agent-v0.3", "ip-masq-agent-v2.0.0", "ip-masq-agent-v2.9", "ip-masq-agent-v2.11",
	"ip-masq-agent-two-jumps", "ip-masq-agent-to-ports", "ip-masq-agent-custom-chain", "ip-masq-gke", "ip-masq-kops",
}

// An olderAgent has the rules of such an agent, and a config with the same
// verdicts.
type olderAgent struct {
	chain  string
	rules  map[nfnetlink.Family]string
	config config.Config
}

func loadOlder(t testing.TB, name string) olderAgent {
	t.Helper()
	a := olderAgent{rules: map[nfnetlink.Family]string{}}
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		text, err := os.ReadFile(filepath.Join("../../testdata/foreign", name, "rules."+family.String()+"tables"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		nfttest.NoError(t, err)
		a.rules[family] = string(text)
		a.chain = regexp.MustCompile(`(?m)^:(\S+) `).FindStringSubmatch(string(text))[1]
		for _, m := range regexp.MustCompile(`(?m)^-A .*-d (\S+) .*-j RETURN$`).FindAllStringSubmatch(string(text), -1) {
			a.config.NonMasqueradeCIDRs = append(a.config.NonMasqueradeCIDRs, cases.CIDRs(m[1])...)
		}
	}
	if len(a.rules) == 0 {
		t.Fatalf("there are no rules of %s", name)
	}
	// The rules above have link-local if they exempt it.
	a.config.MasqLinkLocal, a.config.MasqLinkLocalIPv6 = true, true
	a.config.EnableIPv6 = a.rules[nfnetlink.IPv6] != ""
	return a
}

// withIPv6 adds rules for IPv6, if only those for IPv4 are recorded.
func (a olderAgent) withIPv6() {
	if a.rules[nfnetlink.IPv6] == "" {
		a.rules[nfnetlink.IPv6] = strings.NewReplacer("169.254.0.0/16", "fe80::/10", "10.0.0.0/8", "fd00::/8",
			"172.16.0.0/12", "fd01::/16", "192.168.0.0/16", "fd02::/16").Replace(a.rules[nfnetlink.IPv4])
	}
}

// targets are destinations of which the agent exempts some and masquerades
// others, in the families that it has rules for.
func (a olderAgent) targets() []nfttest.Target {
	destinations := []string{"10.9.0.9", "100.64.0.9", "8.8.8.8"}
	if a.config.EnableIPv6 {
		destinations = append(destinations, "fd00:9::9", "2001:db8:1::1")
	}
	return nfttest.Targets(func(addr netip.Addr) bool {
		return !slices.ContainsFunc(a.config.NonMasqueradeCIDRs, func(c config.CIDR) bool { return c.Contains(addr) })
	}, destinations...)
}

// install loads the agent's rules with iptables itself. The text in first is in
// the same transaction.
func (a olderAgent) install(t testing.TB, ns *nfttest.NS, first map[nfnetlink.Family]string) {
	t.Helper()
	for family, rules := range a.rules {
		head, appended, _ := strings.Cut(rules, "-A ")
		nfttest.Run(t, ns, head+first[family]+"-A "+appended, family.String()+"tables-nft-restore", "--noflush")
	}
}

// comeBack replaces our rules by the agent's, also without a gap.
func (a olderAgent) comeBack(t testing.TB, ns *nfttest.NS, ours nft.Ruleset) {
	t.Helper()
	if ours.Mode() == nft.ModeNFTables {
		a.install(t, ns, nil)
		nfttest.NFT(t, ns, "delete table inet "+nft.TableName, "-f", "-")
		return
	}
	first := map[nfnetlink.Family]string{}
	for _, table := range ours.Tables {
		text := fmt.Sprintf("-D %s %s\n", xtables.Postrouting, table.Chain(xtables.Postrouting).Rules[0])
		if ours.Chain() != a.chain {
			text += fmt.Sprintf("-F %[1]s\n-X %[1]s\n", ours.Chain())
		}
		first[table.Family] = text
	}
	a.install(t, ns, first)
}

// notOurs lists all chains and rules of others, with their handles: a rule that is written again has
// another one, and counts from zero. It leaves out our table, in the tables of iptables our chain, if
// it has a name, and POSTROUTING itself, which we may have created.
func notOurs(t testing.TB, ns *nfttest.NS, chain string) (all []string) {
	t.Helper()
	c := connect(t, ns)
	ours := func(family nfnetlink.Family, table, name string) bool {
		return family == nfnetlink.Inet && table == nft.TableName || chain != "" && family != nfnetlink.Inet &&
			table == xtables.NATTable && name == chain
	}
	for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		err := c.EachChain(f, "", func(ch nfnetlink.Chain) {
			if !ours(f, ch.Table, ch.Name) && ch.Name != xtables.Postrouting {
				all = append(all, fmt.Sprintf("%s %s %s", f, ch.Table, ch.Name))
			}
		})
		nfttest.NoError(t, err)
		for _, r := range rulesOf(t, c, f, "", "") {
			to, _ := r.Target()
			if !ours(f, r.Table, r.Chain) && !ours(f, r.Table, to) {
				all = append(all, fmt.Sprintf("%s %s %s %d: %s", f, r.Table, r.Chain, r.Handle, r.Name()))
			}
		}
	}
	return all
}

// A takeOver is a way to replace an older agent.
type takeOver struct {
	name  string
	want  nft.Ruleset
	depth nft.Depth
}

func (a olderAgent) takeOvers() []takeOver {
	of := func(mode nft.Mode, chain string) nft.Ruleset {
		return nft.Compile(a.config, nft.Options{Layout: cases.Layout(mode, chain), RandomFully: true})
	}
	return []takeOver{
		{"nftables", of(nft.ModeNFTables, ""), nft.TakeOver},
		// The chain with our own name is changed to ours without a request.
		{"iptables-nft, the same chain", of(nft.ModeIPTables, a.chain), nft.WithLeftovers},
		{"iptables-nft, another chain", of(nft.ModeIPTables, "TAKES-OVER"), nft.TakeOver},
	}
}

func TestTakeoversCauseNoWrongSource(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	for i, name := range olderTexts {
		if i%nfttest.FullRounds(3, 1) > 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			agent, top := loadOlder(t, name), nfttest.NewTopology(t)
			loadForeign(t, top.Node)
			before := notOurs(t, top.Node, "")
			agent.install(t, top.Node, nil)
			h := nfttest.StartHammer(t, top, agent.targets()...)
			h.Ease()
			for _, way := range agent.takeOvers() {
				t.Run(way.name, func(t *testing.T) {
					k := open(t, top.Node)
					for range nfttest.FullRounds(2, 60) {
						wait(t, h, 3)
						if diffs := apply(t, k, way.want, way.depth); len(diffs) == 0 {
							t.Fatal("nothing done")
						}
						if diff := cmp.Diff(before, notOurs(t, top.Node, way.want.Chain())); diff != "" {
							t.Errorf("what is not ours (-before the agent +after the take-over):\n%s", diff)
						}
						inSync(t, top.Node, way.want)
						if left, err := k.Older(t.Context(), way.want); err != nil || len(left) > 0 {
							t.Errorf("left %v: %v", left, err)
						}
						agent.comeBack(t, top.Node, way.want)
					}
					wait(t, h, 3)
					if tally := h.SoFar(); tally.Leaked()+tally.Wronged() > 0 {
						t.Errorf("so far: %s", tally)
					}
				})
			}
			settled(t, h)
		})
	}
}

// wait waits for a number of further flows to each target.
func wait(t *testing.T, h *nfttest.Hammer, flows uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), nfttest.Patient(30*time.Second))
	defer cancel()
	nfttest.NoError(t, h.Wait(ctx, flows))
}

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
			a, err := k.Apply(t.Context(), native, nft.WithLeftovers)
			if err != nil || len(a.Removed)+len(a.TookOver) > 0 {
				t.Errorf("%+v, %v", a, err)
			}
			stay("after Apply")
			if decides, err := k.OlderDecides(t.Context()); !decides || err != nil {
				t.Errorf("the older agent decides: %t, %v", decides, err)
			}
			if found, err := k.Doubtful(t.Context()); len(found) > 0 || err != nil {
				t.Errorf("in doubt are %v, %v", found, err)
			}
			if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) != 1 {
				t.Errorf("removed %q, %v", removed, err)
			}
			stay("after Cleanup")
			apply(t, k, native, nft.TakeOver)
			nfttest.Same(t, "after the take-over", empty, notOurs(t, ns, ""))
		})
	}
}

func TestChainThatMayBeSomebodyElsesStays(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	want := cases.Load(t, "default").Compile(nft.ModeNFTables)
	apply(t, k, want, nft.TakeOver)
	decides := func() {
		t.Helper()
		if decides, err := k.OlderDecides(t.Context()); decides || err != nil {
			t.Errorf("an older agent decides: %t, %v", decides, err)
		}
	}
	decides()
	iptables(t, ns, nfnetlink.IPv4, "-N", "MINE")
	iptables(t, ns, nfnetlink.IPv4, "-A", "MINE", "-d", "192.0.2.0/24", "-j", "RETURN")
	iptables(t, ns, nfnetlink.IPv4, "-A", "POSTROUTING", "-j", "MINE", "-m", "comment", "--comment",
		"site: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom MINE chain")
	before := notOurs(t, ns, "")
	decides()
	if found, err := k.Doubtful(t.Context()); len(found) != 1 || err != nil {
		t.Errorf("in doubt are %v, %v", found, err)
	}
	apply(t, k, want, nft.TakeOver)
	if removed, err := k.Cleanup(t.Context(), WithOlder); len(removed) != 1 || err != nil {
		t.Errorf("removed %q, %v, want our table", removed, err)
	}
	nfttest.Same(t, "what is not ours (-before +after)", before, notOurs(t, ns, ""))
}

// It is not ours then: cleanup leaves it, and an agent that runs writes its own again.
func TestOlderAgentThatRewritesOurChainIsReplaced(t *testing.T) {
	nfttest.Require(t, "iptables-nft-restore")
	ns, agent := nfttest.NewNS(t, "node"), loadOlder(t, "ip-masq-agent-v2.0.0")
	agent.config.EnableIPv6 = false
	want := nft.Compile(agent.config, nft.Options{Layout: xtables.Layout{ChainName: agent.chain}})
	k := open(t, ns)
	apply(t, k, want, nft.Contents)
	if installed, err := k.Removable(t.Context(), Ours); err != nil || len(installed) != 1 {
		t.Errorf("installed are %q, %v", installed, err)
	}
	// It keeps an existing jump.
	text, _, _ := strings.Cut(agent.rules[nfnetlink.IPv4], "-A POSTROUTING")
	_, rules, _ := strings.Cut(agent.rules[nfnetlink.IPv4], " -j "+agent.chain+"\n")
	rewrite := func() { nfttest.Run(t, ns, text+rules, "iptables-nft-restore", "--noflush") }
	rewrite()
	if a, err := k.Apply(t.Context(), want, everything); err != nil || len(a.Overwritten) != 1 {
		t.Errorf("replaced %q, %v", a.Overwritten, err)
	}
	inSync(t, ns, want)
	rewrite()
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) > 0 {
		t.Errorf("removed %q, %v", removed, err)
	}
	removed, err := k.Cleanup(t.Context(), WithOlder)
	name := "another agent's chain " + agent.chain + " in table ip nat: "
	if err != nil || len(removed) != 1 || !strings.HasPrefix(removed[0], name) {
		t.Errorf("removed with those of older agents %q, %v", removed, err)
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
		want := nft.Compile(agent.config, nft.Options{Layout: xtables.Layout{ChainName: agent.chain}})
		k := open(t, ns)
		six := nfttest.Save(t, ns, "ip6tables-nft-save", "nat")
		apply(t, k, want, nft.WithLeftovers)
		if diff := cmp.Diff(six, nfttest.Save(t, ns, "ip6tables-nft-save", "nat")); diff != "" {
			t.Errorf("%s: IPv6 (-before +after):\n%s", name, diff)
		}
		if found, err := k.Older(t.Context(), want); err != nil || len(found) != 1 || found[0].Family != nfnetlink.IPv6 {
			t.Errorf("%s: %v, %v", name, found, err)
		}
		if a, err := k.Apply(t.Context(), want, nft.TakeOver); err != nil || len(a.TookOver) != 1 {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}

// Rules that iptables-restore wrote have our text, but not our signature: cleanup leaves them, and an agent writes its
// own again. Those to which nothing leads any more are not those of a previous run that decide.
func TestRestoredRulesAreSignedAgain(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore", "iptables-nft-save")
	ns := nfttest.NewNS(t, "node")
	loadForeign(t, ns)
	want, k := xtOf(config.Default(config.Defaults{})), open(t, ns)
	apply(t, k, want, nft.Contents)
	nfttest.Run(t, ns, nfttest.Save(t, ns, "iptables-nft-save", "nat"), "iptables-nft-restore")
	saved := nfttest.Save(t, ns, "iptables-nft-save", "nat")
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) > 0 {
		t.Errorf("unsigned rules were removed: %q, %v", removed, err)
	}
	if diffs := apply(t, k, want, everything); len(diffs) == 0 {
		t.Error("they were not signed")
	}
	inSync(t, ns, want)
	if diff := cmp.Diff(saved, nfttest.Save(t, ns, "iptables-nft-save", "nat")); diff != "" {
		t.Errorf("rules (-saved +signed):\n%s", diff)
	}
	for _, jump := range []bool{true, false} {
		if got, is, err := k.Installed(t.Context()); err != nil || is != jump || is && got.Hash != want.Hash() {
			t.Errorf("with a jump %t: installed %t, %+v, %v", jump, is, got, err)
		}
		iptables(t, ns, nfnetlink.IPv4, "-F", xtables.Postrouting)
	}
}
