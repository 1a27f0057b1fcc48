package main

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// olderVersions are the cases of testdata/foreign with rules of an iptables-based
// agent. Without LONG=1 only the first ones are tested: one with our chain name,
// one with our text, one with a different name, one that writes to legacy
// ip_tables.
var olderVersions = []string{
	"ip-masq-agent-v2.9", "ip-masq-agent-v2.0.0", "ip-masq-agent-custom-chain", "ip-masq-agent-v2.11" + inLegacy,
	"ip-masq-agent-v0.3", "ip-masq-agent-v2.11", "ip-masq-agent-two-jumps", "ip-masq-agent-to-ports",
	"ip-masq-gke", "ip-masq-kops",
}

// An olderAgent is such an agent's rules in the kernel, and its config. It also
// exempts onlyHere, which no defaults do.
type olderAgent struct {
	rules  string
	config string
	cidrs  []netip.Prefix
	xt     string // its program, without -restore and -save
}

const (
	onlyHere = "203.0.113.0/24"
	inLegacy = " in legacy ip_tables"
)

func loadOlder(t *testing.T, name string) olderAgent {
	t.Helper()
	name, legacy := strings.CutSuffix(name, inLegacy)
	text, err := os.ReadFile(filepath.Join(root, "testdata/foreign", name, "rules.iptables"))
	nfttest.NoError(t, err)
	exempts := regexp.MustCompile(`(?m)^-A (.*)-d (\S+) (.*-j RETURN\n)`)
	all := exempts.FindAllStringSubmatch(string(text), -1)
	a := olderAgent{rules: string(text), config: "masqLinkLocal: true\nnonMasqueradeCIDRs:\n", xt: "iptables-nft"}
	if legacy {
		a.xt = "iptables-legacy"
	}
	last := all[len(all)-1]
	if !slices.ContainsFunc(all, func(m []string) bool { return m[2] == onlyHere }) {
		all = append(all, []string{"", "", onlyHere})
		a.rules = strings.Replace(a.rules, last[0], last[0]+"-A "+last[1]+"-d "+onlyHere+" "+last[3], 1)
	}
	for _, m := range all {
		a.config += "- " + m[2] + "\n"
		a.cidrs = append(a.cidrs, netip.MustParsePrefix(m[2]))
	}
	return a
}

// install writes the rules like the agent: its chain in one transaction, and a
// jump only if there is none.
func (a olderAgent) install(n *testNode) {
	n.t.Helper()
	rules := a.rules
	for _, jump := range regexp.MustCompile(`(?m)^-A (POSTROUTING .*)\n`).FindAllStringSubmatch(rules, -1) {
		if strings.Contains(nfttest.Run(n.t, n.NS, "", a.xt+"-save", "-t", "nat"), jump[1]) {
			rules = strings.Replace(rules, jump[0], "", 1)
		}
	}
	nfttest.Run(n.t, n.NS, rules, a.xt+"-restore", "--noflush")
}

func (a olderAgent) targets() []nfttest.Target {
	return nfttest.Targets(func(addr netip.Addr) bool {
		return !slices.ContainsFunc(a.cidrs, func(p netip.Prefix) bool { return p.Contains(addr) })
	}, "203.0.113.9", "10.244.9.9", "100.64.0.9", "8.8.8.8")
}

// mistakes are files that the agent rejects, by kind of mistake, with what it
// must enforce next to an older agent's rules.
func (a olderAgent) mistakes() map[string]string {
	return map[string]string{
		"a misspelled key":  a.config + "resyncIntervall: 30s\n",
		"a doubled key":     a.config + "masqLinkLocalIPv6: true\nmasqLinkLocalIPv6: false\n",
		"a second document": a.config + "---\nnonMasqueradeCIDRs: [192.0.2.0/24]\n",
		"a broken document": a.config + "---\n\t@\n",
		"a leading zero":    strings.Replace(a.config, "- 10.0.0.0/8\n", "- 10.0.0.0/010\n", 1), // an error here
		"a key of a fork":   a.config + "outputInterface: eth0\n",
		"interval 0s":       a.config + "resyncInterval: 0s\n",
		"a quoted bool":     a.config + "enableIPv6: \"true\"\n",       // a key that the older agents do not have
		"host bits":         "nonMasqueradeCIDRs: [198.51.100.7/24]\n", // the older agents reject it, too
	}
}

// source returns what is enforced with such a mistake.
func source(mistake string) string {
	if slices.Contains([]string{"host bits", "a quoted bool", "a leading zero"}, mistake) {
		return "foreign"
	}
	return "lenient"
}

func (n *testNode) cleanup() {
	n.t.Helper()
	if got := n.run("cleanup"); got.code != exitDone {
		n.t.Fatalf("%+v", got)
	}
}

func flows(t *testing.T, h *nfttest.Hammer, n uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	nfttest.NoError(t, h.Wait(ctx, n))
}

// noneWrong stops the hammer and checks that no connection had a source other
// than with the older agent.
func noneWrong(t *testing.T, h *nfttest.Hammer) {
	t.Helper()
	flows(t, h, 20)
	tally, err := h.Stop()
	nfttest.NoError(t, err)
	if err := tally.Err(); err != nil {
		t.Error(err)
	}
	t.Log(tally)
}

func TestRejectedFileIsNeverWorseThanTheOlderAgent(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for i, version := range olderVersions[:nfttest.FullRounds(2, len(olderVersions))] {
		inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
			nfttest.Require(t, "nft", "iptables-nft-restore", "iptables-nft-save", "iptables-legacy-restore",
				"iptables-legacy-save")
			top := nfttest.NewTopology(t)
			n, older := nodeIn(t, top.Node), loadOlder(t, version)
			older.install(n)
			h := nfttest.StartHammer(t, top, older.targets()...)
			h.Ease()
			mistakes := older.mistakes()
			for j, mistake := range slices.Sorted(maps.Keys(mistakes)) {
				for k, takeOver := range []bool{true, false} {
					another := (i+j+k)%2 > 0 || j%2 > 0 != (mode == nft.ModeIPTables)
					if another && !nfttest.Long() {
						continue // with the other version, or in the other mode
					}
					n.swap(mistakes[mistake])
					d := n.start(flag, fmt.Sprintf("--takeover=%t", takeOver))
					line := d.await("config_rejected")
					if want := source(mistake); line["source"] != want {
						t.Errorf("%s, %s: %v, want source %s", version, mistake, line, want)
					}
					flows(t, h, 3)
					d.signal(unix.SIGHUP)
					flows(t, h, 3)
					d.stop()
					older.install(n)
					n.cleanup()
					if tally := h.SoFar(); tally.Leaked()+tally.Wronged() > 0 {
						t.Fatalf("%s, %s, takeover %t: %s", version, mistake, takeOver, tally)
					}
				}
			}
			noneWrong(t, h)
		})
	}
}

func TestTakeoverAndWayBackCauseNoWrongSource(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	rounds := nfttest.FullRounds(1, 20)
	for _, version := range olderVersions[:nfttest.FullRounds(2, len(olderVersions))] {
		inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
			nfttest.Require(t, "nft", "iptables-nft-restore", "iptables-nft-save", "iptables-legacy-restore",
				"iptables-legacy-save")
			top := nfttest.NewTopology(t)
			n, older := nodeIn(t, top.Node), loadOlder(t, version)
			older.install(n)
			n.swap(older.config)
			h := nfttest.StartHammer(t, top, older.targets()...)
			h.Ease()
			for range rounds {
				d := n.start(flag, "--takeover")
				d.await("config_applied")
				flows(t, h, 5)
				d.stop()
				older.install(n)
				flows(t, h, 5)
				n.cleanup()
				flows(t, h, 5)
				if listing := n.kernelText(); strings.Contains(listing, "table inet") {
					t.Errorf("%s: left of ours:\n%s", version, listing)
				}
				if tally := h.SoFar(); tally.Leaked()+tally.Wronged() > 0 {
					t.Fatalf("%s: %s", version, tally)
				}
			}
			noneWrong(t, h)
		})
	}
}
