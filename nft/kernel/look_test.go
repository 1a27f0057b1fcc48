package kernel

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

func TestOnlyTheGenerationIsReadWithoutChanges(t *testing.T) {
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			r := newRig(t)
			want := cases.Load(t, "all-policies").Compile(mode)
			f := r.faults(0, fault{})
			k := f.open()
			defer k.Close()
			apply(t, k, want, Look{})
			f.seen = nil
			for range 10 {
				if diffs := apply(t, k, want, Look{}); len(diffs) > 0 {
					t.Errorf("undid %q", diffs)
				}
				if diffs, err := k.Diff(t.Context(), want, Look{}); err != nil || len(diffs) > 0 {
					t.Errorf("Diff says %q, error %v", diffs, err)
				}
			}
			if got := slices.Compact(f.seen); len(f.seen) != 40 || slices.Contains(got, callCommit) {
				t.Errorf("20 looks made %d calls: %v", len(f.seen), f.seen)
			}

			// Another program's transaction causes one check, and nothing is written.
			f.bystander()
			before := generation(t, r.ns)
			apply(t, k, want, Look{})
			f.seen = nil
			apply(t, k, want, Look{})
			if len(f.seen) != 2 || generation(t, r.ns) != before {
				t.Errorf("the second look made %d calls; generation %d, was %d", len(f.seen), generation(t, r.ns), before)
			}
		})
	}
}

func TestDiffWritesNothing(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	apply(t, k, cases.Load(t, "default").Compile(nft.ModeNFTables), Look{})
	before := generation(t, ns)
	for _, m := range cases.Modes() {
		for _, look := range []Look{{}, everything} {
			if diffs, err := k.Diff(t.Context(), cases.Load(t, "all-policies").Compile(m), look); err != nil || len(diffs) == 0 {
				t.Errorf("mode %s: Diff says %q, error %v", m, diffs, err)
			}
		}
	}
	if after := generation(t, ns); after != before {
		t.Errorf("generation %d became %d", before, after)
	}
}

func TestLargeSetIsReadWholeOnlyWhenAsked(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	want := nft.Compile(tamperConfig(native.BigSet+500), nft.Options{Layout: native.Layout{}})
	k := open(t, ns)
	apply(t, k, want, Look{})
	counted := func() bool {
		sets, err := connect(t, ns).Sets(nfnetlink.Inet, nft.TableName)
		if err != nil {
			t.Fatal(err)
		}
		return sets[0].Counted
	}()
	for _, tt := range []struct {
		name, do string
		seen     bool // detected without reading the whole set
	}{
		{"delete element", "delete element TABLE SET { 10.0.0.0/24 }", counted},
		{"add element", "add element TABLE SET { 198.51.100.8 }", counted},
		{"exchange element", "delete element TABLE SET { 10.0.0.0/24 }; add element TABLE SET { 8.8.8.0/24 }", false},
		{"widen element to the last address", "add element TABLE SET { 128.0.0.0-255.255.255.255 }; delete element TABLE SET { 10.0.0.0/24 }", counted},
		{"element for everything", "", counted},
		{"flush set", "flush set TABLE SET", counted},
		{"flush chain", "flush chain TABLE postrouting", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := &attacker{t: t, ns: ns, table: "inet " + nft.TableName, set: liveSet(t, ns)}
			if tt.do == "" {
				a.catchAll()
			}
			a.nft(tt.do)
			// Kernels without a count are read from time to time.
			if diffs, err := k.Diff(t.Context(), want, Look{}); err != nil || (len(diffs) > 0) != tt.seen && (counted || tt.seen) {
				t.Errorf("a short look finds %q, error %v", diffs, err)
			}
			diffs, err := k.Diff(t.Context(), want, Look{Full: true})
			if err != nil || len(diffs) == 0 {
				t.Errorf("a full look finds %q, error %v", diffs, err)
			}
			if diff := cmp.Diff(diffs, apply(t, k, want, Look{Full: true})); diff != "" {
				t.Errorf("Apply undid (-found +undone):\n%s", diff)
			}
			inSync(t, ns, want)
		})
	}
}

func TestLargeChainIsReadWholeOnlyWhenAsked(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	want := xtOf(tamperConfig(500))
	k := open(t, ns)
	chains := k.readers[1].(*xtables.Reader)
	chains.BigChain = 400
	apply(t, k, want, Look{})
	for _, tt := range []struct {
		name        string
		do          func(*attacker)
		short, full bool // which check finds it
	}{
		{"nothing of ours", does("add table inet foreign"), false, false},
		{"delete rule", runs("-D IP-MASQ-AGENT 3"), true, true},
		{"add rule", runs("-I IP-MASQ-AGENT -j ACCEPT"), true, true},
		{"replace rule", runs("-R IP-MASQ-AGENT 3 -d 198.51.100.8 -j RETURN"), false, true},
		{"flush chain", runs("-F IP-MASQ-AGENT"), true, true},
		{"recreate the chain", runs("-F POSTROUTING", "-F IP-MASQ-AGENT", "-X IP-MASQ-AGENT", "-N IP-MASQ-AGENT"), true, true},
		{"delete jump", (*attacker).deleteJump, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// The next check comes before a hundred times the cost of this one.
			if diffs, err := k.Diff(t.Context(), want, Look{Full: true}); err != nil || len(diffs) > 0 {
				t.Fatalf("at first: %q, %v", diffs, err)
			}
			chains.LastRead, chains.LastCost = time.Now(), time.Minute
			tt.do(&attacker{t: t, ns: ns, table: "inet " + nft.TableName, want: want})
			for _, look := range []Look{{Quick: true}, {}} {
				if diffs, err := k.Diff(t.Context(), want, look); err != nil || (len(diffs) > 0) != tt.short {
					t.Errorf("%+v finds %q, error %v", look, diffs, err)
				}
			}
			if a, err := k.Apply(t.Context(), want, Look{Full: true}); err != nil || (len(a.Differences) > 0) != tt.full {
				t.Errorf("a full look finds %q, error %v", a.Differences, err)
			}
			if diffs, err := k.Diff(t.Context(), want, Look{Quick: true}); err != nil || len(diffs) > 0 {
				t.Errorf("then a quick look finds %q, error %v", diffs, err)
			}
		})
	}
	inSync(t, ns, want)
}

func TestNodeWithoutIPv6Works(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	for _, name := range []string{"all", "default", "lo"} {
		if err := ns.Sysctl("net.ipv6.conf."+name+".disable_ipv6", "1"); err != nil {
			t.Fatal(err)
		}
	}
	k := open(t, ns)
	for _, name := range []string{"both-families", "default", "both-families"} {
		for _, m := range cases.Modes() {
			want := cases.Load(t, name).Compile(m)
			apply(t, k, want, everything)
			inSync(t, ns, want)
		}
	}
}

func TestIPv6OffRemovesEverythingOfIPv6(t *testing.T) {
	nfttest.Require(t, "nft")
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		k := open(t, ns)
		on := cases.Load(t, "both-families")
		off := on.Config
		off.EnableIPv6 = false
		apply(t, k, on.Compile(m), Look{})
		apply(t, k, nft.Compile(off, on.Flags(m)), Look{})
		// Not even the name of a counter remains.
		for _, word := range []string{"ip6", "ipv6", "v6"} {
			if text := nfttest.ListRuleset(t, ns); strings.Contains(text, word) {
				t.Errorf("mode %s: %q in\n%s", m, word, text)
			}
		}
	}
}

func TestChangeOfChainNameRemovesTheOldChain(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	k, c := open(t, ns), cases.Load(t, "to-ports-force")
	for _, chain := range []string{cases.DefaultChain, "NON-MASQUERADE-DAEMON", "IP-MASQ", "LONG-NAME-OF-A-CHAIN-23", cases.DefaultChain} {
		o := c.Flags(nft.ModeIPTables)
		o.Layout = xtables.Layout{Name: chain}
		want := nft.Compile(c.Config, o)
		apply(t, k, want, everything)
		inSync(t, ns, want)
		text := nfttest.ListRuleset(t, ns)
		if chains := strings.Count(text, "chain "); chains != strings.Count(text, "chain "+chain)+2 {
			t.Errorf("chain %s is not alone:\n%s", chain, text)
		}
	}
}

func TestTableWithForeignContentStays(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	for what, text := range map[string]string{
		"set":     "add set ip nat foreign { type ipv4_addr; elements = { 192.0.2.1 }; }",
		"map":     "add map ip nat foreign { type ipv4_addr : ipv4_addr; elements = { 192.0.2.1 : 192.0.2.2 }; }",
		"counter": "add counter ip nat foreign",
		"chain":   "add chain ip nat foreign",
		"nothing": "",
	} {
		ns := nfttest.NewNS(t, "node")
		k := open(t, ns)
		apply(t, k, cases.Load(t, "default").Compile(nft.ModeIPTables), Look{})
		nfttest.NFT(t, ns, text, "-f", "-")
		if _, err := k.Cleanup(t.Context(), Ours); err != nil {
			t.Fatal(err)
		}
		if left := nfttest.ListRuleset(t, ns); strings.Contains(left, "foreign") != (text != "") || text == "" && left != "" {
			t.Errorf("next to a foreign %s is left:\n%s", what, left)
		}
	}
}

func TestChainOfAnotherProgramIsRejected(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	iptables(t, ns, nfnetlink.IPv6, "-N", cases.DefaultChain)
	iptables(t, ns, nfnetlink.IPv6, "-A", cases.DefaultChain, "-d", "2001:db8::/32", "-j", "ACCEPT")
	before := nfttest.ListRuleset(t, ns)
	k := open(t, ns)
	if err := k.Check(t.Context(), xtables.Layout{Name: cases.DefaultChain}); !errors.Is(err, nft.ErrForeignChain) {
		t.Errorf("CheckChain says %v", err)
	}
	if err := k.Check(t.Context(), xtables.Layout{Name: "ANOTHER"}); err != nil {
		t.Errorf("CheckChain of a name that is free says %v", err)
	}
	want := cases.Load(t, "both-families").Compile(nft.ModeIPTables)
	if _, err := k.Apply(t.Context(), want, Look{}); !errors.Is(err, nft.ErrForeignChain) {
		t.Errorf("Apply says %v", err)
	}
	if diff := cmp.Diff(before, nfttest.ListRuleset(t, ns)); diff != "" {
		t.Errorf("ruleset (-before +after):\n%s", diff)
	}
	// Foreign rules next to ours are drift.
	iptables(t, ns, nfnetlink.IPv6, "-F", cases.DefaultChain)
	apply(t, k, want, Look{})
	iptables(t, ns, nfnetlink.IPv6, "-F", cases.DefaultChain)
	iptables(t, ns, nfnetlink.IPv6, "-A", cases.DefaultChain, "-d", "2001:db8::/32", "-j", "ACCEPT")
	repairs(t, k, ns, want)
}

func TestConcurrentAgentsLeaveOneRuleset(t *testing.T) {
	nfttest.SkipIfShort(t)
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			whole, halved := halves(10)
			o := nft.Options{Layout: layouts.Of(mode, cases.DefaultChain)}
			a, b := nft.Compile(whole, o), nft.Compile(halved, o)
			tr := transition{from: &a, to: &b}
			for round := range 5 {
				r.reset(transition{})
				var agents sync.WaitGroup
				for i := range 4 {
					agents.Go(func() {
						k := New(nfnetlink.New(dialIn(r.ns)))
						defer k.Close()
						for j := range 5 {
							if _, err := k.Apply(t.Context(), *[]*nft.Ruleset{&a, &b}[(i+j)%2], Look{}); err != nil {
								t.Errorf("round %d, agent %d: %v", round, i, err)
							}
						}
					})
				}
				agents.Wait()
				if effective := tr.effective(t, r.conn); !tr.may(effective) {
					t.Errorf("round %d: effective is %s", round, effective)
				}
				apply(t, New(r.conn), a, Look{})
				inSync(t, r.ns, a)
			}
		})
	}
}

// An empty config is valid, too.
func TestZeroConfigCompiles(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	for _, c := range []config.Config{{}, {EnableIPv6: true}, {MasqLinkLocal: true}} {
		for _, o := range []nft.Options{{Layout: native.Layout{}}, {Layout: xtables.Layout{Name: "X"}}} {
			want := nft.Compile(c, o)
			apply(t, k, want, everything)
			inSync(t, ns, want)
		}
	}
}

// A program that writes all the time prevents a large chain from being read
// completely.
func TestLargeChainIsRepairedWhileOthersKeepWriting(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	want := xtOf(tamperConfig(nfttest.FullRounds(10_000, 31_000)))
	k := open(t, ns)
	apply(t, k, want, Look{})
	c, stop := connect(t, ns), make(chan struct{})
	var others sync.WaitGroup
	others.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			b := &nfnetlink.Batch{}
			b.AddTable(nfnetlink.IPv4, "neighbour")
			if i%2 == 1 {
				b.DelTable(nfnetlink.IPv4, "neighbour")
			}
			if err := c.Commit(b, 0); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for _, do := range []string{
		"flush chain ip nat POSTROUTING", "flush chain ip nat IP-MASQ-AGENT", "insert rule ip nat IP-MASQ-AGENT accept",
		"flush chain ip nat POSTROUTING; flush chain ip nat IP-MASQ-AGENT; delete chain ip nat IP-MASQ-AGENT",
	} {
		nfttest.NFT(t, ns, do, "-f", "-")
		if a, err := k.Apply(t.Context(), want, Look{}); err != nil || len(a.Differences) == 0 {
			t.Errorf("%s: %q, %v", do, a.Differences, err)
		} else {
			t.Logf("%s: %v, %q", do, a.Took, a.Differences[0])
		}
	}
	close(stop)
	others.Wait()
	if diffs := apply(t, k, want, everything); len(diffs) > 0 {
		t.Errorf("left: %q", diffs)
	}
	inSync(t, ns, want)
}
