package xtables_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/xtables"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

var families = []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6}

// rawRules returns the bytes of the rules in the tables that iptables lists, by chain,
// without our signature.
func rawRules(t testing.TB, n *modes.Node) map[string][]nfnetlink.Rule {
	t.Helper()
	all := map[string][]nfnetlink.Rule{}
	for _, f := range families {
		var chains []nfnetlink.Chain
		err := n.Conn.EachChain(f, "", func(c nfnetlink.Chain) { chains = append(chains, c) })
		nfttest.NoError(t, err)
		for _, c := range chains {
			err := n.Conn.EachRule(f, c.Table, c.Name, func(r nfnetlink.Rule) error {
				r.Handle, r.UserData = 0, nil
				all[f.String()+" "+c.Name] = append(all[f.String()+" "+c.Name], r)
				return nil
			})
			nfttest.NoError(t, err)
		}
	}
	return all
}

// restore loads rules with iptables, without those that are there.
func restore(t testing.TB, n *modes.Node, text string) {
	t.Helper()
	nfttest.Run(t, n.NS, text, "iptables-nft-restore", "--noflush")
}

// save returns the rules of IPv4 as iptables saves them, with counters.
func save(t testing.TB, n *modes.Node) string {
	t.Helper()
	return regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(
		nfttest.Run(t, n.NS, "", "iptables-nft-save", "-c", "-t", "nat"), "")
}

// Whatever the tables had before, they have each case then, as iptables writes it.
func TestEachCaseIsWrittenOverTheOneBefore(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	var all []cases.Case
	cases.EachIn(t, nft.ModeIPTables, func(_ *testing.T, c cases.Case) { all = append(all, c) })
	n, theirs := modes.New(t, xtables.Read), modes.New(t, xtables.Read)
	for _, c := range all {
		want := c.Compile(nft.ModeIPTables)
		theirs.Load(t, "flush ruleset")
		if diff := cmp.Diff(c.File(t, "iptables.rules"), want.String()); diff != "" {
			t.Errorf("%s: text (-want +got):\n%s", c.Name, diff)
		}
		restore(t, theirs, want.String())
		if len(want.Tables) > 1 {
			nfttest.Run(t, theirs.NS, want.String(), "ip6tables-nft-restore", "--noflush")
		}
		s := theirs.Read(t, want, nft.WithLeftovers)
		for _, diff := range modes.Texts(s) {
			if !strings.HasPrefix(diff, "replaced: ") {
				t.Errorf("%s: of what iptables wrote differs %s", c.Name, diff)
			}
		}
		if _, ok := s.Installed(); ok {
			t.Errorf("%s: iptables' rules are ours", c.Name)
		}
		if len(want.Tables) == 1 { // what is left of IPv6 is a matter of FindOlder
			n.Load(t, "table ip6 nat\ndelete table ip6 nat")
		}
		n.Apply(t, want, nft.WithLeftovers)
		installed, ok := n.Read(t, want, nft.Contents).Installed()
		if !ok || installed != (nft.Installed{Layout: want.Layout, Hash: want.Hash()}) {
			t.Errorf("%s: installed is %+v, %t", c.Name, installed, ok)
		}
		if diff := cmp.Diff(rawRules(t, theirs), rawRules(t, n)); diff != "" {
			t.Errorf("%s: rules (-iptables +ours):\n%s", c.Name, diff)
		}
		theirs.Apply(t, want, nft.Contents)
	}
}

// wanted has a policy of both families; that of chain A has ports.
func wanted(chain string, change func(*config.Config)) nft.Ruleset {
	c := config.Config{EnableIPv6: true, MasqLinkLocal: true, MasqLinkLocalIPv6: true}
	c.NonMasqueradeCIDRs = cases.CIDRs("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "fd00::/8")
	if change != nil {
		change(&c)
	}
	o := nft.Options{Layout: xtables.Layout{ChainName: chain}}
	if chain == "A" {
		o.Ports = []nft.PortRange{{Min: 1024, Max: 2047}}
	}
	return nft.Compile(c, o)
}

// ofOthers are rules of other programs in the same tables.
const ofOthers = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:OTHER - [0:0]
-A POSTROUTING -s 172.17.0.0/16 -j OTHER
-A OTHER -j MASQUERADE
COMMIT
`

// A change is a case of a file in testdata: what another program does (lines of nft, and of iptables-restore, which begin
// with "-" or ":"), all differences, and as data what is left. "…" at an end is any rest.
type change struct {
	name, nft, iptables string
	finds               []string
	left                string
}

func changes(t *testing.T, file string) (all []change) {
	t.Helper()
	for _, c := range script.Read(t, filepath.Join("testdata", file)) {
		next := change{name: c.Name, finds: c.All('>'), left: c.Last().Data}
		for _, s := range c.Steps {
			line := s.Line + "\n"
			if n, repeated, ok := strings.Cut(line, " × "); ok {
				times, err := strconv.Atoi(n)
				if err != nil {
					t.Fatalf("%s: %v", s.Place, err)
				}
				line = strings.Repeat(repeated, times)
			}
			if line[0] == '-' || line[0] == ':' {
				next.iptables += line
			} else {
				next.nft += line
			}
		}
		all = append(all, next)
	}
	return all
}

// do does what another program does.
func (c change) do(t *testing.T, n *modes.Node) {
	t.Helper()
	if c.iptables != "" {
		restore(t, n, "*nat\n"+c.iptables+"COMMIT\n")
	}
	if c.nft != "" {
		n.Load(t, c.nft)
	}
}

// What another program changes is named and restored, with everything else as it was.
func TestDifferencesAreNamedAndRemoved(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-save", "iptables-nft-restore")
	for _, tt := range changes(t, "differences.txt") {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n, want := modes.New(t, xtables.Read), wanted("A", nil)
			restore(t, n, ofOthers)
			n.Apply(t, want, nft.Contents)
			before, six := save(t, n), rawRules(t, n)
			tt.do(t, n)
			found := modes.Texts(n.Read(t, want, nft.Contents))
			if !modes.Match(found, tt.finds) || len(found) == 0 && len(tt.finds) > 0 {
				t.Errorf("found\n%s\nwant\n%s", strings.Join(found, "\n"), strings.Join(tt.finds, "\n"))
			}
			n.Apply(t, want, nft.Contents)
			if strings.HasPrefix(tt.nft, "delete table") { // with the rules of others
				n.Load(t, "delete table ip nat; delete table ip6 nat")
				restore(t, n, ofOthers)
				n.Apply(t, want, nft.Contents)
			}
			nfttest.Same(t, "saved (-before +after)", before, save(t, n))
			nfttest.Same(t, "rules (-before +after)", six, rawRules(t, n))
		})
	}
}

// count gives each rule of IPv4 a counter of its own, which shows who kept it, as iptables
// restores it: our rules lose their signature.
func count(t testing.TB, n *modes.Node) {
	t.Helper()
	packets := 0
	text := regexp.MustCompile(`(?m)^\[\d+:\d+\] -A`).ReplaceAllStringFunc(save(t, n), func(string) string {
		packets++
		return fmt.Sprintf("[%d:%d] -A", packets, packets*100)
	})
	nfttest.Run(t, n.NS, text, "iptables-nft-restore", "-c")
}

// counted returns what the rules of a chain have counted, by the beginning of their text.
func counted(t testing.TB, n *modes.Node, chain string) (all []string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^\[(\d+):\d+\] -A `+chain+` (-[sd] \S+|-m comment|-j \S+|-p \S+)`).
		FindAllStringSubmatch(save(t, n), -1) {
		all = append(all, m[1]+" "+m[2])
	}
	return all
}

// Rules count by what they do. A chain that differs is written again, and no other program's.
func TestChangeCountsFromZeroAndLeavesOthersCounters(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-save", "iptables-nft-restore")
	n := modes.New(t, xtables.Read)
	if counts, err := xtables.Counters(n.Conn, "B"); err != nil || counts != nil {
		t.Errorf("without a table: %v, %v", counts, err)
	}
	n.Apply(t, wanted("B", nil), nft.Contents)
	restore(t, n, "*nat\n:X - [0:0]\n-A X -j B\nCOMMIT\n") // another program's
	count(t, n)
	before := counted(t, n, "B")
	want := []string{"2 -d 10.1.0.0/16", "3 -d 10.2.0.0/16", "4 -d 10.3.0.0/16", "5 -m comment"}
	if !slices.Equal(before, want) {
		t.Fatalf("before: %q", before)
	}
	counts, err := xtables.Counters(n.Conn, "B")
	if diff := cmp.Diff([]nft.Counts{
		{Verdict: nft.Exempt, Packets: 2 + 3 + 4},
		{Verdict: nft.Masqueraded, Packets: 5},
		{IPv6: true, Verdict: nft.Exempt},
		{IPv6: true, Verdict: nft.Masqueraded},
	}, counts); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if counts, err := xtables.Counters(n.Conn, "C"); err != nil || counts != nil {
		t.Errorf("of another chain: %v, %v", counts, err)
	}
	others := counted(t, n, "X")
	for _, cidrs := range [][]string{{"10.1.0.0/16", "10.9.0.0/16"}, {"10.3.0.0/16", "10.1.0.0/16", "10.1.0.0/16"}} {
		n.Apply(t, wanted("B", func(c *config.Config) { c.NonMasqueradeCIDRs = cases.CIDRs(cidrs...) }), nft.Contents)
		var want []string
		for _, c := range cidrs {
			want = append(want, "0 -d "+c)
		}
		if got := counted(t, n, "B"); !slices.Equal(got, append(want, "0 -m comment")) {
			t.Errorf("%q: %q, want %q", cidrs, got, want)
		}
		if got := counted(t, n, "X"); !slices.Equal(got, others) || len(got) == 0 {
			t.Errorf("%q: others have %q, want %q", cidrs, got, others)
		}
	}
}

// Whatever has the name of our chain is replaced, and nothing else is touched: the rules of another agent, or
// those that a listing of the ruleset has brought back. A POSTROUTING that iptables cannot use is named.
func TestWhateverHasOurNameIsReplaced(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-save", "iptables-nft-restore")
	want := wanted("A", nil)
	for _, tt := range changes(t, "others.txt") {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n, clean := modes.New(t, xtables.Read), modes.New(t, xtables.Read)
			restore(t, n, ofOthers)
			restore(t, clean, ofOthers)
			clean.Apply(t, want, nft.Contents)
			tt.do(t, n)
			s := n.Read(t, want, nft.Contents)
			if found := modes.Texts(s); !modes.Match(found, tt.finds) {
				t.Errorf("found\n%s\nwant\n%s", strings.Join(found, "\n"), strings.Join(tt.finds, "\n"))
			}
			if _, ok := s.Installed(); ok {
				t.Error("it is ours")
			}
			if strings.HasPrefix(tt.finds[0], "prevented: ") {
				if err := s.Differences()[0].Err; !errors.Is(err, nft.ErrPostroutingHook) {
					t.Error(err)
				}
				return
			}
			n.Apply(t, want, nft.Contents)
			nfttest.Same(t, "saved (-in a clean table +here)", save(t, clean), save(t, n))
			nfttest.Same(t, "rules (-in a clean table +here)", rawRules(t, clean), rawRules(t, n))
		})
	}
}

// Rules of ours for another policy are not another agent's.
func TestRulesOfAnotherPolicyAreOurs(t *testing.T) {
	n, want := modes.New(t, xtables.Read), wanted("A", nil)
	n.Apply(t, want, nft.Contents)
	another := wanted("A", func(c *config.Config) { c.NonMasqueradeCIDRs = nil })
	found := modes.Texts(n.Read(t, another, nft.Contents))
	replaced := func(d string) bool { return strings.HasPrefix(d, "replaced: ") }
	if !slices.Contains(found, "table ip nat: chain A does not have the hash of the policy") ||
		slices.ContainsFunc(found, replaced) {
		t.Errorf("found %q", found)
	}
	now, after := &nfnetlink.Batch{}, &nfnetlink.Batch{}
	s := n.Read(t, want, nft.Contents)
	s.Switch(now, after)
	if _, ok := s.Installed(); !ok || now.Len()+after.Len() > 0 {
		t.Errorf("installed %t; of what is right, it writes %d and %d messages", ok, now.Len(), after.Len())
	}
	n.Load(t, "flush chain ip nat POSTROUTING; flush chain ip6 nat POSTROUTING")
	if installed, ok := n.Read(t, want, nft.Contents).Installed(); ok {
		t.Errorf("without a jump, %+v is installed", installed)
	}
}

// A jump that is to be deleted is read once more, because its handle alone does not tell what it is now.
func TestJumpThatHasChangedSinceStays(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	const other = "ip saddr 10.9.0.0/16 "
	for _, does := range []string{
		"replace rule ip nat POSTROUTING handle HANDLE " + other + "accept",
		"delete table ip nat",
	} {
		n, want := modes.New(t, xtables.Read), wanted("A", nil)
		n.Apply(t, want, nft.Contents)
		n.Load(t, "add rule ip nat POSTROUTING "+other+"jump A")
		s, now, after := n.Read(t, want, nft.Contents), &nfnetlink.Batch{}, &nfnetlink.Batch{}
		rules, err := modes.Rules(n.Conn, nfnetlink.IPv4, xtables.NATTable, xtables.Postrouting)
		nfttest.NoError(t, err)
		n.Load(t, strings.ReplaceAll(does, "HANDLE", fmt.Sprint(rules[1].Handle)))
		before := nfttest.ListRuleset(t, n.NS)
		s.Switch(now, after)
		if err := n.Conn.Commit(now); !errors.Is(err, nfnetlink.ErrReadAgain) {
			t.Errorf("%s: %v", does, err)
		}
		nfttest.Same(t, "listing (-before +after)", before, nfttest.ListRuleset(t, n.NS))
	}
}

// The kernel ends a dump at a rule that it cannot list.
func TestRulesThatTheKernelDoesNotListAreSeen(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	insert := func(n *modes.Node, chain string) {
		args := []string{"-t", "nat", "-I", chain}
		for range 60 {
			args = append(args, "-m", "bpf", "--bytecode", "64,"+strings.Repeat("0 0 0 0,", 63)+"6 0 0 1")
		}
		nfttest.Run(t, n.NS, "", "iptables-nft", append(args, "-j", "ACCEPT")...)
	}
	n, want := modes.New(t, xtables.Read), wanted("A", nil)
	n.Apply(t, want, nft.Contents)
	before := rawRules(t, n)
	insert(n, "A")
	if found := n.Apply(t, want, nft.Contents); len(found) == 0 {
		t.Error("nothing differs")
	}
	nfttest.Same(t, "rules (-before +after)", before, rawRules(t, n))
	insert(n, xtables.Postrouting)
	found := n.Read(t, want, nft.Contents).Differences()
	if !slices.ContainsFunc(found, func(d nft.Difference) bool {
		return d.Kind == nft.Prevented && d.Err != nil && strings.Contains(d.Text, "too large for the kernel to list")
	}) {
		t.Errorf("found %v", found)
	}
}

// Each entry of the file has its rule, in the order of the file: also one that another covers, or that is there twice.
// Comments name the agent that has the chain.
func TestViewHasARuleForEachEntryOfTheFile(t *testing.T) {
	lists := [][]string{
		{"10.1.0.0/16", "10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/16"},
		{"192.0.2.0/24", "169.254.0.0/16", "10.0.0.0/8", "169.254.169.254/32"},
		{"0.0.0.0/0", "10.0.0.0/8", "0.0.0.0/0"},
	}
	for chain, agent := range map[string]string{
		"IP-MASQ-AGENT": "ip-masq-agent", "OTHER": "ip-masq-agent", "NON-MASQUERADE-DAEMON": "non-masquerade-daemon",
	} {
		for _, list := range lists {
			c := config.Config{NonMasqueradeCIDRs: cases.CIDRs(list...)}
			text := nft.Compile(c, nft.Options{Layout: xtables.Layout{ChainName: chain}}).String()
			var got []string
			for _, m := range regexp.MustCompile(`(?m)^-A `+chain+` (?:-d (\S+) )?-m comment --comment "`+agent+`: (\S+)`).
				FindAllStringSubmatch(text, -1) {
				if m[1] == "" {
					m[1] = "0.0.0.0/0"
				}
				got = append(got, m[2]+" "+m[1])
			}
			want := []string{"cluster-local 169.254.0.0/16"}
			for _, cidr := range list {
				want = append(want, "cluster-local "+cidr)
			}
			if want = append(want, "outbound 0.0.0.0/0"); !slices.Equal(got, want) {
				t.Errorf("%s: %q, want %q", chain, got, want)
			}
			if n := strings.Count(text, "--comment"); n != strings.Count(text, `"`+agent+": ") {
				t.Errorf("%s: %d comments, not all of %s\n%s", chain, n, agent, text)
			}
		}
	}
}

func TestAThousandCIDRsOfAFamilyFit(t *testing.T) {
	var four, six []config.CIDR
	for i := range 1001 {
		four = append(four, cases.CIDRs(fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255))...)
		six = append(six, cases.CIDRs(fmt.Sprintf("fd00:%x::/32", i))...)
		six[i].Pos.Line = i + 1
	}
	const fits = " CIDRs, mode iptables-nft takes at most 1000: use mode nftables"
	for _, tt := range []struct {
		exempt []config.CIDR
		want   string
	}{
		{slices.Concat(four[:1000], six[:1000]), ""},
		{slices.Concat(four[:10], six[:1001]), "1001 IPv6" + fits},
		{four, "1001 IPv4" + fits},
	} {
		got, pos := "", config.Position{}
		for _, p := range (xtables.Layout{}).Check(config.Config{NonMasqueradeCIDRs: tt.exempt}) {
			got, pos = got+p.Msg, p.Pos
		}
		if got != tt.want || strings.Contains(got, "IPv6") && pos.Line != 1001 {
			t.Errorf("%q at %+v, want %q", got, pos, tt.want)
		}
	}
}

func TestChainNamesThatIPTablesRejectsAreRejected(t *testing.T) {
	tests := map[string]string{ // name: the reason, "" for a valid one
		"IP-MASQ-AGENT":         "",
		"IP-MASQ":               "",
		"NON-MASQUERADE-DAEMON": "",
		"masquerade":            "", // only the target in capitals is reserved
		"postrouting":           "",
		"a!-b":                  "",
		strings.Repeat("A", 28): "",
		strings.Repeat("A", 29): "has 29 characters, iptables takes at most 28",
		"":                      "is empty",
		"-x":                    "begins with '-'",
		"!x":                    "begins with '!'",
		"A B":                   "has white space",
		"A\tB":                  "has white space",
		"A\u00a0B":              "has white space",
		"A\x7fB":                "does not print",
		"A\"B":                  "has a quote",
		`A\B`:                   "a backslash",
		"POSTROUTING":           "is a built-in chain",
		"MASQUERADE":            "is a target of iptables",
		"RETURN":                "is a target of iptables",
		"TCPMSS":                "is a target of iptables",
	}
	for name, want := range tests {
		err := xtables.CheckChain(name)
		switch {
		case want == "" && err != nil:
			t.Errorf("CheckChain(%q): %v", name, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("CheckChain(%q): %v, want %q", name, err, want)
		}
	}
}

func TestNothingIsStagedForACanceledChange(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := (&xtables.State{}).Stage(ctx, func(*nfnetlink.Batch) error {
		t.Error("a transaction")
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
