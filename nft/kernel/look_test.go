package kernel

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
	"nft-masq-agent/nft/xtables"
)

func TestDiffWritesNothing(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	apply(t, k, cases.Load(t, "default").Compile(nft.ModeNFTables), layout.Ours)
	before := generation(t, ns)
	for _, m := range cases.Modes() {
		for _, look := range []layout.Depth{layout.Ours, everything} {
			if diffs, err := k.Diff(t.Context(), cases.Load(t, "all-policies").Compile(m), look); err != nil || len(diffs) == 0 {
				t.Errorf("mode %s: Diff says %q, error %v", m, diffs, err)
			}
		}
	}
	if after := generation(t, ns); after != before {
		t.Errorf("generation %d became %d", before, after)
	}
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
		apply(t, k, on.Compile(m), layout.Ours)
		apply(t, k, nft.Compile(off, on.Flags(m)), layout.Ours)
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
	for _, chain := range []string{
		cases.DefaultChain, "NON-MASQUERADE-DAEMON", "IP-MASQ", "LONG-NAME-OF-A-CHAIN-23",
		cases.DefaultChain,
	} {
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
		apply(t, k, cases.Load(t, "default").Compile(nft.ModeIPTables), layout.Ours)
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
	if _, err := k.Apply(t.Context(), want, layout.Ours); !errors.Is(err, nft.ErrForeignChain) {
		t.Errorf("Apply says %v", err)
	}
	if diff := cmp.Diff(before, nfttest.ListRuleset(t, ns)); diff != "" {
		t.Errorf("ruleset (-before +after):\n%s", diff)
	}
	// Foreign rules next to ours are drift.
	iptables(t, ns, nfnetlink.IPv6, "-F", cases.DefaultChain)
	apply(t, k, want, layout.Ours)
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
						k := New(nfnetlink.New(dialIn(r.ns)), rule.String)
						defer k.Close()
						for j := range 5 {
							if _, err := k.Apply(t.Context(), *[]*nft.Ruleset{&a, &b}[(i+j)%2], layout.Ours); err != nil {
								t.Errorf("round %d, agent %d: %v", round, i, err)
							}
						}
					})
				}
				agents.Wait()
				if effective := tr.effective(t, r.conn); !tr.may(effective) {
					t.Errorf("round %d: effective is %s", round, effective)
				}
				apply(t, New(r.conn, rule.String), a, layout.Ours)
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
