package kernel

import (
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/rule"
	"nft-masq-agent/nft/xtables"
)

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
