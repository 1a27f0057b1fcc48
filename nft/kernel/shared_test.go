package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/xtables"
)

// iptables runs iptables-nft, or ip6tables-nft, on table nat.
func iptables(t testing.TB, ns *nfttest.NS, f nfnetlink.Family, args ...string) string {
	t.Helper()
	return nfttest.Run(t, ns, "", f.String()+"tables-nft", append([]string{"-t", "nat"}, args...)...)
}

// xtOf compiles for mode iptables-nft.
func xtOf(c config.Config) nft.Ruleset {
	return nft.Compile(c, nft.Options{Layout: xtables.Layout{ChainName: cases.DefaultChain}})
}

// A ruleset that was saved and is loaded again, by iptables or by nft, is replaced by our rules. Those of others stay.
func TestSavedRulesetIsReplacedAtTheStart(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft-save", "ip6tables-nft-restore")
	want := cases.Load(t, "both-families").Compile(nft.ModeIPTables)
	reload := map[string]func(ns *nfttest.NS){
		"nft list ruleset": func(ns *nfttest.NS) {
			// Where nft does not know a match, its listing says so, and does not load.
			unknown := regexp.MustCompile(`(?m)^.*(xt (match|target)|skuid|# ).*\n`)
			saved := unknown.ReplaceAllString(nfttest.ListRuleset(t, ns), "")
			nfttest.NFT(t, ns, "flush ruleset\n"+saved, "-f", "-")
		},
		"iptables-save": func(ns *nfttest.NS) {
			for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
				nfttest.Run(t, ns, nfttest.Save(t, ns, program+"-save", "nat"), program+"-restore")
			}
		},
	}
	for name, load := range reload {
		for _, running := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, running %t", name, running), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				loadForeign(t, ns)
				k := open(t, ns)
				apply(t, k, want, nft.Contents)
				load(ns)
				others := notOurs(t, ns, cases.DefaultChain)
				if !running {
					k = open(t, ns)
				}
				a, err := k.Apply(t.Context(), want, nft.WithLeftovers)
				if err != nil || len(a.Overwritten) != 2 {
					t.Errorf("replaced %q, %v", a.Overwritten, err)
				}
				inSync(t, ns, want)
				for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
					if at := jumps(t, connect(t, ns), f); len(at) != 1 {
						t.Errorf("%s: jumps at %d", f, at)
					}
				}
				nfttest.Same(t, "what is not ours (-loaded +after)", others, notOurs(t, ns, cases.DefaultChain))
				for _, f := range want.Tables { // rules to which nothing leads do not decide
					if _, found, err := k.Installed(t.Context()); err != nil || !found {
						t.Errorf("a previous run is not found: %v", err)
					}
					iptables(t, ns, f.Family, "-F", xtables.Postrouting)
				}
				if _, found, err := k.Installed(t.Context()); err != nil || found {
					t.Errorf("without a jump, a previous run is found, or %v", err)
				}
			})
		}
	}
}

// jumps returns the positions in POSTROUTING of the jumps to our chain.
func jumps(t testing.TB, c *nfnetlink.Conn, f nfnetlink.Family) []int {
	t.Helper()
	rules := rulesOf(t, c, f, xtables.NATTable, xtables.Postrouting)
	var places []int
	for i, r := range rules {
		if to, _ := r.Target(); to == cases.DefaultChain {
			places = append(places, i)
		}
	}
	return places
}

// testdata returns a file of testdata.
func testdata(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	nfttest.NoError(t, err)
	return string(text)
}

// rulesByName returns the rules of a file of testdata, by the names of its cases.
func rulesByName(t testing.TB, name string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, c := range script.Read(t, filepath.Join("testdata", name)) {
		all[c.Name] = c.Text()
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
	a, b := cases.Load(t, "default").Compile(nft.ModeIPTables), cases.Load(t, "to-ports-several").Compile(nft.ModeIPTables)
	for i := 0; len(done) == 0; i++ {
		apply(t, k, []nft.Ruleset{a, b}[i%2], nft.Contents)
	}
	if err := <-done; err != nil {
		t.Errorf("the other writer: %v", err)
	}
	apply(t, k, b, nft.Contents)
	inSync(t, ns, b)
	loop := func(line string) bool { return strings.HasPrefix(line, "ip nat LOOP") }
	after := slices.DeleteFunc(notOurs(t, ns, cases.DefaultChain), loop)
	nfttest.Same(t, "foreign rules (-before +after)", before, after)
}

// iptables does not use a POSTROUTING with another hook than its own, and we do
// not delete another program's chain.
func TestPostroutingWithAnotherHookIsReported(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	want, nf := cases.Load(t, "both-families").Compile(nft.ModeIPTables),
		cases.Load(t, "both-families").Compile(nft.ModeNFTables)
	for _, family := range []string{"ip", "ip6"} {
		for _, hook := range []string{
			"type nat hook postrouting priority 50;", "type nat hook output priority 100;",
			"type filter hook postrouting priority 100;", "",
		} {
			t.Run(family+" "+hook, func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				nfttest.NFT(t, ns, fmt.Sprintf("table %s nat { chain POSTROUTING { %s counter comment \"another program's\"; }; }",
					family, hook), "-f", "-")
				says := fmt.Sprintf("table %s nat: chain POSTROUTING has another hook or priority than that of iptables", family)
				k := open(t, ns)
				apply(t, k, nf, everything) // unrelated to the other mode
				before := nfttest.ListRuleset(t, ns)
				diffs, err := k.Diff(t.Context(), want, nft.Contents)
				if err != nil || !slices.Contains(diffs, says) {
					t.Errorf("Diff returned %q, %v, want %q", diffs, err, says)
				}
				for range 2 {
					a, err := k.Apply(t.Context(), want, nft.WithLeftovers)
					if !errors.Is(err, nft.ErrPostroutingHook) || !strings.Contains(err.Error(), says) ||
						!strings.Contains(err.Error(), fmt.Sprintf("nft delete chain %s nat POSTROUTING", family)) {
						t.Errorf("Apply returned %v, error %v", a, err)
					}
				}
				nfttest.Same(t, "the kernel (-before +after)", before, nfttest.ListRuleset(t, ns))
				nfttest.NFT(t, ns, fmt.Sprintf("flush chain %s nat POSTROUTING; delete chain %[1]s nat POSTROUTING", family), "-f",
					"-")
				apply(t, k, want, everything)
				inSync(t, ns, want)
			})
		}
	}
}

// The kernel does not wake a table and create a base chain in it in one transaction.
func TestADormantTableNatWakesWhateverItHas(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	want := cases.Load(t, "both-families").Compile(nft.ModeIPTables)
	for _, chains := range []string{
		"chain EMPTY { }", "chain PREROUTING { type nat hook prerouting priority -100; }",
		"chain POSTROUTING { type nat hook postrouting priority 100; counter; }", "chain IP-MASQ-AGENT { masquerade; }",
	} {
		t.Run(chains, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			for _, family := range []string{"ip", "ip6"} {
				nfttest.NFT(t, ns, fmt.Sprintf("table %s nat { flags dormant; %s; }", family, chains), "-f", "-")
			}
			apply(t, open(t, ns), want, everything)
			inSync(t, ns, want)
		})
	}
}

// The kernel does not delete a chain to which another program's rule or map
// refers. It is emptied, and has no effect then.
func TestChainInUseByOthersIsEmptied(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	with, none := cases.Load(t, "ipv6").Compile(nft.ModeIPTables), nft.Ruleset{} // none: an older agent's rules
	nf := cases.Load(t, "default").Compile(nft.ModeNFTables)
	takesOver, otherMode := applies(nf, nft.TakeOver), applies(nf, nft.WithLeftovers)
	const (
		ours, theirs = cases.DefaultChain, "IP-MASQ"
		jumpsTo      = "add rule ip nat FOREIGN goto %s"
		mapped       = "add map ip nat verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : jump %s }; }"
	)
	for _, tt := range []struct {
		name   string
		keeps  string // a chain
		by     string
		before nft.Ruleset
		do     func(context.Context, *Kernel) ([]string, error)
	}{
		{"cleanup", ours, "add rule ip nat FOREIGN ip daddr 192.0.2.1 jump %s", with, cleansUp(Ours)},
		{"cleanup with a goto", ours, jumpsTo, with, cleansUp(Ours)},
		{"cleanup with a map", ours, mapped, with, cleansUp(Ours)},
		{"take-over", theirs, jumpsTo, none, takesOver},
		{"take-over with a map", theirs, mapped, none, takesOver},
		{"other mode", ours, jumpsTo, with, otherMode},
		{"cleanup of an older agent", theirs, jumpsTo, none, cleansUp(WithOlder)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k := open(t, ns)
			if tt.before.Chain() == "" {
				loadOlder(t, "ip-masq-gke").install(t, ns, nil)
			} else {
				apply(t, k, tt.before, nft.Contents)
			}
			nfttest.NFT(t, ns, "add chain ip nat FOREIGN; "+fmt.Sprintf(tt.by, tt.keeps), "-f", "-")
			foreign := rulesOf(t, connect(t, ns), nfnetlink.IPv4, xtables.NATTable, "FOREIGN")
			removed, err := tt.do(t.Context(), k)
			if err != nil || len(removed) == 0 {
				t.Errorf("removed %q, %v", removed, err)
			}
			c := connect(t, ns)
			for _, chain := range []string{tt.keeps, xtables.Postrouting} {
				if rules := rulesOf(t, c, nfnetlink.IPv4, xtables.NATTable, chain); len(rules) > 0 {
					t.Errorf("chain %s has %d rules", chain, len(rules))
				}
			}
			if diff := cmp.Diff(foreign, rulesOf(t, c, nfnetlink.IPv4, xtables.NATTable, "FOREIGN")); diff != "" {
				t.Errorf("rules of another program (-before +after):\n%s", diff)
			}
			if again, err := tt.do(t.Context(), k); err != nil || len(again) > 0 {
				t.Errorf("a second time: %q, %v", again, err)
			}
		})
	}
}

func applies(want nft.Ruleset, depth nft.Depth) func(context.Context, *Kernel) ([]string, error) {
	return func(ctx context.Context, k *Kernel) ([]string, error) {
		a, err := k.Apply(ctx, want, depth)
		return append(a.Removed, a.Differences...), err
	}
}

func cleansUp(what Removal) func(context.Context, *Kernel) ([]string, error) {
	return func(ctx context.Context, k *Kernel) ([]string, error) { return k.Cleanup(ctx, what) }
}

// What is ours goes, and nothing of other programs. What is wanted is in brackets, else nothing. Verbs and format:
// testdata/README.md.
func TestWhatIsNotWantedIsRemoved(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	ofChain := func(name string) nft.Ruleset {
		return nft.Compile(config.Config{MasqLinkLocal: true}, nft.Options{Layout: xtables.Layout{ChainName: name}})
	}
	wants := map[string]nft.Ruleset{
		"(plain)":  ofChain("OTHER-NAME"),
		"(native)": nft.Compile(config.Config{}, nft.Options{Layout: native.Layout{}}),
	}
	c := config.Config{EnableIPv6: true, MasqLinkLocal: true, MasqLinkLocalIPv6: true}
	full := nft.Compile(c, nft.Options{
		Layout: xtables.Layout{ChainName: "A"}, Ports: []nft.PortRange{{Min: 1024, Max: 2047}},
	})
	for _, tt := range script.Read(t, "testdata/removed.txt") {
		t.Run(tt.Name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k := open(t, ns)
			apply(t, k, full, nft.Contents)
			var tables, ruleset string
			for _, s := range tt.Steps {
				if strings.HasPrefix(s.Line, "-") {
					tables += s.Line + "\n"
				} else {
					ruleset += s.Line + "\n"
				}
			}
			if tables != "" {
				nfttest.Run(t, ns, "*nat\n"+tables+"COMMIT\n", "iptables-nft-restore", "--noflush")
			}
			if ruleset != "" {
				nfttest.NFT(t, ns, ruleset, "-f", "-")
			}
			do := cleansUp(Ours)
			want, wanted := wants[tt.Name[strings.LastIndex(tt.Name, " ")+1:]]
			if wanted {
				do = func(ctx context.Context, k *Kernel) ([]string, error) {
					a, err := k.Apply(ctx, want, nft.WithLeftovers)
					return a.Removed, err
				}
			}
			removed, err := do(t.Context(), open(t, ns))
			if diff := cmp.Diff(tt.All('>'), removed); err != nil || diff != "" {
				t.Errorf("%v; removed (-want +got):\n%s", err, diff)
			}
			if wanted {
				inSync(t, ns, want)
			}
			left, stays := nfttest.ListRuleset(t, ns), tt.Last().Data
			head, more := strings.CutSuffix(stays, "…\n")
			if left != stays && (!more || !strings.HasPrefix(left, head)) {
				t.Errorf("left\n%s\nwant\n%s", left, stays)
			}
		})
	}
}

// A config that turns IPv6 off takes effect with the change.
func TestChainOfADisabledFamilyGoesWithTheChange(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	apply(t, k, cases.Load(t, "both-families").Compile(nft.ModeIPTables), nft.Contents)
	want := cases.Load(t, "default").Compile(nft.ModeIPTables)
	a, err := k.Apply(t.Context(), want, nft.Contents)
	if err != nil || len(a.Removed) == 0 {
		t.Errorf("removed %q, %v", a.Removed, err)
	}
	if left := nfttest.ListRuleset(t, ns); strings.Contains(left, "ip6 nat") {
		t.Errorf("left are\n%s", left)
	}
	inSync(t, ns, want)
}

// What others may do to the shared table, as commands of iptables-nft; RULES is our chain. Those that
// the state of the table does not allow fail.
var meddling = []string{
	"-E RULES FOO", "-E RULES IP-MASQ", "-E FOO RULES", "-E FOO BAR",
	"-F POSTROUTING", "-F RULES", "-F FOO", "-X", "-X FOO", "-X IP-MASQ",
	"-D POSTROUTING 1", "-D POSTROUTING 2", "-D RULES 1", "-D FOO 1",
	"-A POSTROUTING -j RULES", "-A POSTROUTING -j FOO", "-A POSTROUTING -g RULES",
	"-N FOO", "-N IP-MASQ", "-A POSTROUTING -j IP-MASQ", "-A IP-MASQ -j FOO",
	"-A IP-MASQ -j MASQUERADE -m comment --comment ip-masq:_outbound", "-A RULES -d 192.0.2.98 -j RETURN",
	"-A FOO -d 192.0.2.98 -j RETURN", "-A RULES -j FOO",
	"-N OTHER", "-A OTHER -d 192.0.2.99 -j RULES", "-A OTHER -d 192.0.2.99 -j RETURN",
	"-A POSTROUTING -d 192.0.2.99 -j OTHER",
	"-A POSTROUTING -d 192.0.2.99 -j ACCEPT", "-I POSTROUTING -d 192.0.2.99 -j RETURN",
}

// Whatever others do to the shared table, and whatever the config is then, Apply writes our rules, and a
// further one, which looks at everything, removes what is left. Rules of others stay, in their order. Then Cleanup
// removes our chain once, although rules of others in it make it an older agent's, too.
func TestRulesAreRestoredWhateverOthersDoToTheSharedTable(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft")
	wants := []nft.Ruleset{
		cases.Load(t, "to-ports-several").Compile(nft.ModeIPTables), cases.Load(t, "ipv6").Compile(nft.ModeIPTables),
		cases.Load(t, "default").Compile(nft.ModeIPTables), cases.Load(t, "default").Compile(nft.ModeNFTables),
	}
	for seed := range uint64(nfttest.Rounds(3, 12, 1000)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			ns := nfttest.NewNS(t, "node")
			m := meddler{rand.New(rand.NewPCG(seed, 46)), ns, nil}
			defer func() {
				if t.Failed() {
					t.Logf("after\n%s\n%s", strings.Join(m.done, "\n"), nfttest.ListRuleset(t, ns))
				}
			}()
			k := open(t, ns)
			apply(t, k, wants[m.IntN(3)], nft.Contents)
			for range 4 {
				m.meddle()
				before := othersRules(t, ns)
				want, depth := wants[m.IntN(len(wants))], nft.Contents+nft.Depth(m.IntN(3))
				m.done = append(m.done, fmt.Sprintf("mode %s, depth %d", want.Mode(), depth))
				_, err := k.Apply(t.Context(), want, depth)
				nfttest.NoError(t, err)
				apply(t, k, want, max(depth, nft.WithLeftovers))
				inSync(t, ns, want)
				if diff := cmp.Diff(before, othersRules(t, ns)); diff != "" {
					t.Fatalf("rules of others (-before +after):\n%s", diff)
				}
				left, err := k.Older(t.Context(), want)
				if err != nil || depth == nft.TakeOver && len(xtables.Removable(left)) > 0 {
					t.Fatalf("chains of older agents that are left: %v, %v", left, err)
				}
			}
			apply(t, k, wants[2], nft.Contents)
			iptables(t, ns, nfnetlink.IPv4, "-A", cases.DefaultChain, "-d", "192.0.2.98", "-j", "RETURN")
			if _, err := k.Cleanup(t.Context(), WithOlder); err != nil {
				t.Error(err)
			}
			if left, err := k.Removable(t.Context(), WithOlder); err != nil || len(left) > 0 {
				t.Errorf("cleanup left %q, %v", left, err)
			}
		})
	}
}

// A meddler changes the shared table.
type meddler struct {
	*rand.Rand
	ns   *nfttest.NS
	done []string
}

// meddle does some of what others may do.
func (m *meddler) meddle() {
	for range 1 + m.IntN(6) {
		do := strings.ReplaceAll(meddling[m.IntN(len(meddling))], "RULES", cases.DefaultChain)
		args := append([]string{"-t", "nat"}, strings.Fields(do)...)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "_", " ")
		}
		if _, err := m.ns.Output("", "iptables-nft", args...); err == nil {
			m.done = append(m.done, do)
		}
	}
}

// othersRules returns the rules of others in POSTROUTING.
func othersRules(t *testing.T, ns *nfttest.NS) []string {
	t.Helper()
	all := strings.Split(iptables(t, ns, nfnetlink.IPv4, "-S", xtables.Postrouting), "\n")
	return slices.DeleteFunc(all, func(rule string) bool { return !strings.Contains(rule, "192.0.2.99") })
}

// A dump has parts of 32 KiB at most. A rule of so many matches, of half a kilobyte each, just fits.
const longRule = 50

// insertLong inserts a rule with a number of matches.
func insertLong(t *testing.T, ns *nfttest.NS, chain string, matches int) {
	t.Helper()
	args := []string{"-I", chain}
	for range matches {
		args = append(args, "-m", "bpf", "--bytecode", "64,"+strings.Repeat("0 0 0 0,", 63)+"6 0 0 1")
	}
	iptables(t, ns, nfnetlink.IPv4, append(args, "-j", "ACCEPT")...)
}

func TestLongRulesHideNothing(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	insertLong(t, ns, xtables.Postrouting, longRule)
	if rules := nfttest.In(t, ns, func() ([]nfnetlink.Rule, error) {
		c := nfnetlink.Dial()
		defer c.Close()
		return rulesOf(t, c, nfnetlink.IPv4, xtables.NATTable, xtables.Postrouting), nil
	}); len(rules) != 1 {
		t.Errorf("the first dump of a socket has %d rules, want the long one alone", len(rules))
	}
	for _, matches := range []int{1, 8, longRule} {
		for _, mode := range cases.Modes() {
			t.Run(fmt.Sprintf("%d matches, %s", matches, mode), func(t *testing.T) {
				ns := nfttest.NewNS(t, "node")
				insertLong(t, ns, xtables.Postrouting, matches)
				iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-j", "MASQUERADE")
				err := ns.Do(func() (err error) {
					k := New(nfnetlink.Dial())
					for _, differs := range []bool{true, false} { // over sockets that have received nothing before
						diffs := apply(t, k, cases.Load(t, "default").Compile(mode), nft.WithLeftovers)
						if (len(diffs) > 0) != differs {
							t.Errorf("differences are %v, want some: %t", diffs, differs)
						}
						err = errors.Join(err, k.Close())
					}
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestIPTablesPrintsTheDocumentedView(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft", "iptables-nft-save")
	defaults, only10 := config.Default(config.Defaults{}), config.Config{NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8")}
	six := config.Config{NonMasqueradeCIDRs: cases.CIDRs("fd00:10::/32"), EnableIPv6: true}
	masqLinkLocal, ours := only10, xtables.Layout{ChainName: cases.DefaultChain}
	masqLinkLocal.MasqLinkLocal = true
	ports := []nft.PortRange{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}}
	for _, tt := range []struct {
		name    string
		config  config.Config
		options nft.Options
	}{
		{"default", defaults, nft.Options{Layout: ours}},
		{"only-10", only10, nft.Options{Layout: ours}},
		{"masq-link-local", masqLinkLocal, nft.Options{Layout: ours}},
		{"random-fully", defaults, nft.Options{Layout: ours, RandomFully: true}},
		{"to-ports", defaults, nft.Options{Layout: ours, Ports: ports}},
		{"non-masquerade-daemon", defaults, nft.Options{Layout: xtables.Layout{ChainName: "NON-MASQUERADE-DAEMON"}}},
		{"ipv6", six, nft.Options{Layout: ours}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "view")
			want := nft.Compile(tt.config, tt.options)
			apply(t, open(t, ns), want, nft.Contents)
			program := "iptables-nft"
			if tt.config.EnableIPv6 {
				program = "ip6tables-nft"
			}
			for file, got := range map[string]string{
				tt.name + ".list.txt": nfttest.Run(t, ns, "", program, "-t", "nat", "-L", tt.options.Layout.Chain()),
				tt.name + ".save.txt": nfttest.Save(t, ns, program+"-save", "nat"),
			} {
				text, err := os.ReadFile(filepath.Join("../../testdata/views", file))
				nfttest.NoError(t, err)
				if diff := cmp.Diff(string(text), got); diff != "" {
					t.Errorf("%s (-documented +printed):\n%s", file, diff)
				}
			}
			for line := range strings.Lines(nfttest.Save(t, ns, program+"-save", "nat")) {
				if rule, ok := strings.CutPrefix(line, "-A "); ok {
					nfttest.Run(t, ns, rule, "xargs", nfttest.Command(program).Path, "-t", "nat", "-C")
				}
			}
			inSync(t, ns, want)
		})
	}
}
