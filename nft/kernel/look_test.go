package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

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

func TestCanceledApplyKeepsTheOldRules(t *testing.T) {
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		k := open(t, ns)
		before := cases.Load(t, "default").Compile(m)
		apply(t, k, before, layout.Ours)
		after := cases.Load(t, "all-policies").Compile(m)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, applied := k.Apply(ctx, after, layout.Ours)
		_, diff := k.Diff(ctx, after, layout.Ours)
		_, _, installed := k.Installed(ctx)
		_, decides := k.OlderDecides(ctx)
		_, kept := k.Kept(ctx)
		_, only := k.OnlyNAT(ctx)
		_, removable := k.Removable(ctx, WithLegacy)
		for _, err := range []error{applied, diff, installed, decides, kept, only, removable} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("mode %s: %v", m, err)
			}
		}
		inSync(t, ns, before)
		apply(t, k, after, layout.Ours)
		inSync(t, ns, after)
	}
}

const (
	flagOwner   = 1 << 1 // NFT_TABLE_F_OWNER
	flagPersist = 1 << 2 // NFT_TABLE_F_PERSIST
)

// own creates a table that belongs to the socket of the returned connection: when
// that is closed, the table is deleted, or with the flag persist stays.
func own(t testing.TB, ns *nfttest.NS, family nfnetlink.Family, table string, flags uint32) *nfnetlink.Conn {
	t.Helper()
	nl := nfttest.Own(t, ns, byte(family), table, flags)
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nl, nil })
	if _, err := c.Generation(); err != nil { // opens it
		t.Fatal(err)
	}
	return c
}

// A table of another process stays as it is. When that process closes its socket,
// the table vanishes, or stays without an owner; other programs' chains in a
// shared table then stay, too. It is not parallel: a program that another test is
// about to start has the socket for a moment.
func TestTableWithAnOwnerIsReportedAndThenReplaced(t *testing.T) {
	nfttest.SkipIfShort(t)
	const dormant = 1 << 0 // NFT_TABLE_F_DORMANT
	nfttest.Require(t, "nft")
	for mode, want := range map[nft.Mode]nft.Ruleset{
		nft.ModeNFTables: nft.Compile(tamperConfig(10), nft.Options{Layout: native.Layout{}}),
		nft.ModeIPTables: xtOf(tamperConfig(10)),
	} {
		for name, flags := range map[string]uint32{
			"owner": flagOwner, "persistent": flagOwner | flagPersist, "dormant": flagOwner | flagPersist | dormant,
		} {
			for _, running := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, running %t", mode, name, running), func(t *testing.T) {
					replacesOwned(t, want, flags, running)
				})
			}
		}
	}
}

func replacesOwned(t *testing.T, want nft.Ruleset, flags uint32, running bool) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	table := want.Tables[0]
	if running {
		apply(t, k, want, everything)
		nfttest.NFT(t, ns, "", "delete", "table", table.Family.String(), table.Name)
	}
	owner := own(t, ns, table.Family, table.Name, flags)
	theirs := nfnetlink.Chain{Family: table.Family, Table: table.Name, Name: "theirs"}
	var b nfnetlink.Batch
	b.AddChain(theirs)
	if err := owner.Commit(&b, 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := k.Apply(t.Context(), want, layout.Ours)
		if !errors.Is(err, unix.EPERM) || !strings.Contains(Hint(err), "another process owns the table") {
			t.Errorf("Apply says %v; %q", err, Hint(err))
		}
	}
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	apply(t, k, want, layout.Ours)
	inSync(t, ns, want)
	chains, err := connect(t, ns).Chains(table.Family)
	if err != nil {
		t.Fatal(err)
	}
	kept := slices.ContainsFunc(chains, func(c nfnetlink.Chain) bool { return c.Name == theirs.Name })
	if shared := table.Name != nft.TableName; kept != (shared && flags&flagPersist != 0) {
		t.Errorf("the other program's chain exists: %t", kept)
	}
}
