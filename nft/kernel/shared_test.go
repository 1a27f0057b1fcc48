package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// iptables runs iptables-nft, or ip6tables-nft, on table nat.
func iptables(t testing.TB, ns *nfttest.NS, f nfnetlink.Family, args ...string) string {
	t.Helper()
	program := map[nfnetlink.Family]string{nfnetlink.IPv4: "iptables-nft", nfnetlink.IPv6: "ip6tables-nft"}[f]
	return nfttest.Run(t, ns, "", program, append([]string{"-t", "nat"}, args...)...)
}

// xtOf compiles for mode iptables-nft.
func xtOf(c config.Config) nft.Ruleset {
	return nft.Compile(c, nft.Options{Layout: xtables.Layout{Name: cases.DefaultChain}})
}

func TestOtherAgentsRulesInOurChainAreReportedOnce(t *testing.T) {
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	iptables(t, ns, nfnetlink.IPv4, "-N", cases.DefaultChain)
	iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-j", cases.DefaultChain)
	iptables(t, ns, nfnetlink.IPv4, "-A", cases.DefaultChain, "-j", "MASQUERADE", "--random-fully",
		"-m", "comment", "--comment", "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)")
	k := open(t, ns)
	for _, want := range []nft.Ruleset{
		xtOf(config.Default(config.Defaults{})),
		xtOf(config.Config{NonMasqueradeCIDRs: cases.CIDRs("100.64.0.0/10")}),
	} {
		a, err := k.Apply(t.Context(), want, layout.Ours)
		if err != nil {
			t.Fatal(err)
		}
		var expected []string
		if want.Same(xtOf(config.Default(config.Defaults{}))) {
			expected = []string{"chain IP-MASQ-AGENT in table ip nat: 1 rule, random-fully"}
		}
		if diff := cmp.Diff(expected, a.Replaced); diff != "" {
			t.Errorf("replaced (-want +got):\n%s", diff)
		}
		k = open(t, ns) // the new process finds rules of ours
	}
}

// jumps returns the positions in POSTROUTING of the jumps to our chain.
func jumps(t testing.TB, c *nfnetlink.Conn, f nfnetlink.Family) []int {
	t.Helper()
	rules := rulesOf(t, c, f, xtables.NATTable, xtables.Postrouting)
	var places []int
	for i, r := range rules {
		if to, _ := facts.Target(r); to == cases.DefaultChain {
			places = append(places, i)
		}
	}
	return places
}

// testdata returns a file of testdata.
func testdata(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// paragraphs returns those of a file of testdata, by their names: the first lines.
func paragraphs(t testing.TB, name string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for paragraph := range strings.SplitSeq(strings.TrimSpace(testdata(t, name)), "\n\n") {
		first, rest, _ := strings.Cut(paragraph, "\n")
		all[strings.TrimPrefix(first, "# ")] = rest
	}
	return all
}

// loadForeign loads other programs' rules in the shared tables, of both families, and in some of
// their own, with nonzero counters.
func loadForeign(t testing.TB, ns *nfttest.NS) {
	t.Helper()
	four := testdata(t, "others.iptables")
	nfttest.Run(t, ns, four, "iptables-nft-restore", "-c")
	six := strings.NewReplacer("10.96.0.1/32", "fd00:96::1", "10.244.7.0/24", "fd00:10:244:7::/64",
		"224.0.0.0/4", "ff00::/8", "192.0.2.7/32", "2001:db8::7").Replace(four)
	nfttest.Run(t, ns, six, "ip6tables-nft-restore", "-c")
	nfttest.NFT(t, ns, testdata(t, "others.nft"), "-f", "-")
}

func TestConcurrentForeignWriterIsNotDisturbed(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	ns := nfttest.NewNS(t, "node")
	loadForeign(t, ns)
	before := notOurs(t, ns, cases.DefaultChain)
	done := make(chan error, 1)
	go func() {
		var err error
		for n := 0; n < nfttest.FullRounds(40, 400) && err == nil; n++ {
			text := fmt.Sprintf("*nat\n:LOOP - [0:0]\n-A LOOP -d 192.0.2.%d/32 -j ACCEPT\n-A LOOP -j RETURN\nCOMMIT\n", n%200)
			_, err = ns.Output(text, "iptables-nft-restore", "--noflush")
		}
		done <- err
	}()
	k := open(t, ns)
	a, b := cases.Load(t, "default").Compile(nft.ModeIPTables), cases.Load(t, "all-policies").Compile(nft.ModeIPTables)
	for i := 0; len(done) == 0; i++ {
		apply(t, k, []nft.Ruleset{a, b}[i%2], layout.Ours)
	}
	if err := <-done; err != nil {
		t.Errorf("the other writer: %v", err)
	}
	apply(t, k, b, layout.Ours)
	inSync(t, ns, b)
	loop := func(line string) bool { return strings.HasPrefix(line, "ip nat LOOP") }
	after := slices.DeleteFunc(notOurs(t, ns, cases.DefaultChain), loop)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("foreign rules (-before +after):\n%s", diff)
	}
}
