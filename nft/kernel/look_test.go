package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/xtables"
)

func TestConcurrentAgentsLeaveOneRuleset(t *testing.T) {
	nfttest.SkipIfShort(t)
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a, b := neighborConfigs(mode, 10)
			tr := transition{from: &a, to: &b}
			for round := range 5 {
				r.reset(transition{})
				var agents sync.WaitGroup
				for i := range 4 {
					agents.Go(func() {
						k := open(t, r.ns)
						for j := range 5 {
							want := *[]*nft.Ruleset{&a, &b}[(i+j)%2]
							_, err := k.Apply(t.Context(), want, nft.Contents)
							for Delayed(err) { // which an agent tries again, too
								_, err = k.Apply(t.Context(), want, nft.Contents)
							}
							if err != nil {
								t.Errorf("round %d, agent %d: %v", round, i, err)
							}
						}
					})
				}
				agents.Wait()
				if effective := tr.effective(t, r.conn); !tr.may(effective) {
					t.Errorf("round %d: effective is %s", round, effective)
				}
				apply(t, New(r.conn), a, nft.Contents)
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
		apply(t, k, before, nft.Contents)
		after := cases.Load(t, "all-policies").Compile(m)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, applied := k.Apply(ctx, after, nft.Contents)
		_, diff := k.Diff(ctx, after, nft.Contents)
		_, _, installed := k.Installed(ctx)
		_, decides := k.OlderDecides(ctx)
		_, kept := k.Doubtful(ctx)
		_, removable := k.Removable(ctx, WithOlder)
		for _, err := range []error{applied, diff, installed, decides, kept, removable} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("mode %s: %v", m, err)
			}
		}
		inSync(t, ns, before)
		apply(t, k, after, nft.Contents)
		inSync(t, ns, after)
	}
}

// A table of another process stays as it is. When that process closes its socket,
// the table vanishes, or stays without an owner; other programs' chains in a
// shared table then stay, too. It is not parallel: a program that another test is
// about to start has the socket for a moment.
func TestTableWithAnOwnerIsReportedAndThenReplaced(t *testing.T) {
	nfttest.SkipIfShort(t)
	const dormant, owner, persist = 1 << 0, 1 << 1, 1 << 2 // NFT_TABLE_F_DORMANT, _OWNER, _PERSIST
	nfttest.Require(t, "nft")
	for mode, want := range map[nft.Mode]nft.Ruleset{
		nft.ModeNFTables: nft.Compile(tamperConfig(10), nft.Options{Layout: native.Layout{}}),
		nft.ModeIPTables: xtOf(tamperConfig(10)),
	} {
		for name, flags := range map[string]uint32{
			"owner": owner, "persistent": owner | persist, "dormant": owner | persist | dormant,
		} {
			for _, running := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, running %t", mode, name, running), func(t *testing.T) {
					replacesOwned(t, want, flags, running, mode == nft.ModeIPTables && flags&persist != 0)
				})
			}
		}
	}
}

func replacesOwned(t *testing.T, want nft.Ruleset, flags uint32, running, keeps bool) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	table := want.Tables[0]
	if running {
		apply(t, k, want, everything)
		nfttest.NFT(t, ns, "", "delete", "table", table.Family.String(), table.Name)
	}
	nl := nfttest.Own(t, ns, byte(table.Family), table.Name, flags)
	owner := nfnetlink.New(func() (*netlink.Conn, error) { return nl, nil })
	theirs := nfnetlink.Chain{Family: table.Family, Table: table.Name, Name: "theirs"}
	var b nfnetlink.Batch
	b.AddChain(theirs)
	nfttest.NoError(t, owner.Commit(&b))
	for range 2 {
		_, err := k.Apply(t.Context(), want, nft.Contents)
		if !errors.Is(err, unix.EPERM) || !strings.Contains(Hint(err), "another process owns the table") {
			t.Errorf("Apply says %v; %q", err, Hint(err))
		}
	}
	nfttest.NoError(t, owner.Close())
	apply(t, k, want, nft.Contents)
	inSync(t, ns, want)
	exists := false
	err := connect(t, ns).EachChain(table.Family, table.Name, func(c nfnetlink.Chain) {
		exists = exists || c.Name == theirs.Name
	})
	nfttest.NoError(t, err)
	if exists != keeps {
		t.Errorf("the other program's chain exists: %t", !keeps)
	}
}

// attack runs a transaction of nft. TABLE is our table, and NAME-? the name that a set has now.
func attack(t testing.TB, ns *nfttest.NS, script string) {
	t.Helper()
	sets, err := connect(t, ns).Sets(nfnetlink.Inet, nft.TableName)
	if err != nil && !nfnetlink.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, s := range sets {
		script = strings.ReplaceAll(script, s.Name[:len(s.Name)-1]+"?", s.Name)
	}
	nfttest.NFT(t, ns, strings.ReplaceAll(script, "TABLE", "inet "+nft.TableName), "-f", "-")
}

// rulesOf returns the rules of a chain, or of all that a name left out can be.
func rulesOf(t testing.TB, c *nfnetlink.Conn, f nfnetlink.Family, table, chain string) []nfnetlink.Rule {
	t.Helper()
	rules, err := modes.Rules(c, f, table, chain)
	nfttest.NoError(t, err)
	return rules
}

func tamperConfig(n int) config.Config {
	c := config.Config{MasqLinkLocal: true, EnableIPv6: true}
	for i := range n {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0}), 24)
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
	}
	c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, cases.CIDRs("fd00::/8", "2001:db8:1::/48")...)
	return c
}

// A Frame is everything but the elements of sets, of which it has the number.
func TestFrameLeavesOutOnlyTheElements(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	ns := nfttest.NewNS(t, "node")
	c := tamperConfig(10)
	c.SNATAddresses = cases.CIDRs("198.51.100.208/29")
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	addresses := cases.Addrs("198.51.100.211", "198.51.100.212")
	want = want.WithAddresses(addresses)
	k := open(t, ns)
	apply(t, k, want, nft.Contents)
	for _, tt := range []struct{ do, finds string }{
		{do: "flush chain TABLE postrouting", finds: "missing rule"},
		{do: "delete table TABLE", finds: "is missing"},
		{do: "flush ruleset", finds: "is missing"},
		{do: "add set TABLE theirs { type ipv4_addr; }", finds: "set theirs"},
		{do: "delete element TABLE non-masq-v4-? { 10.0.0.0/24 }; add element TABLE non-masq-v4-? { 198.51.100.0/24 }"},
	} {
		if diffs := apply(t, k, want, nft.Contents); len(diffs) > 0 { // counts what was written
			t.Fatalf("before %q: %q", tt.do, diffs)
		}
		attack(t, ns, tt.do)
		seen := tt.finds != ""
		diffs := strings.Join(apply(t, k, want, nft.Frame), "\n")
		if seen != (diffs != "") || seen && !strings.Contains(diffs, tt.finds) {
			t.Errorf("after %q a Frame has %q, want %q: %t", tt.do, diffs, tt.finds, seen)
		}
		if !seen {
			apply(t, k, want, nft.Contents)
		}
		inSync(t, ns, want)
	}
	// What was right for another policy, or before an error, is not trusted, also if the number of elements is right.
	another := tamperConfig(10)
	another.NonMasqueradeCIDRs[0] = cases.CIDRs("198.51.100.0/24")[0]
	another.SNATAddresses = c.SNATAddresses
	other := nft.Compile(another, nft.Options{Layout: native.Layout{}}).WithAddresses(addresses)
	apply(t, k, other, nft.Frame)
	inSync(t, ns, other)
	f := &faults{dial: dialIn(ns), fault: fault{rejecting, unix.ENOMEM}}
	k = f.open()
	apply(t, k, other, nft.Contents)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, ctx := range []context.Context{t.Context(), ended} { // what is written is rejected, and nothing is read
		attack(t, ns, "delete element TABLE non-masq-v4-? { 10.0.2.0/24 }; add element TABLE non-masq-v4-? { 10.0.0.0/24 }")
		f.at = f.calls
		if _, err := k.Apply(ctx, other, nft.Contents); err == nil {
			t.Error("applied although nothing is written or read")
		}
		f.at = 0
		apply(t, k, other, nft.Frame)
		inSync(t, ns, other)
	}
}

func TestHintNamesTheMissingKernelFeature(t *testing.T) {
	for _, tt := range []struct {
		what  string
		errno unix.Errno
		names string // what the hint must mention; "" for no hint
	}{
		{"rejected: create chain", unix.EOPNOTSUPP, "CONFIG_NFT_NAT"},
		{"rejected: create chain", unix.ENOENT, "modprobe nft_chain_nat"},
		{"rejected: create rule", unix.ENOENT, "NFT_MASQ, NFT_FIB_INET"},
		{"rejected: create rule", unix.ENOENT, "xt_MASQUERADE"},
		{"list rules", unix.EPERM, "NET_ADMIN"},
		{"rejected: create rule", unix.EPERM, "another process owns the table"},
		{"read generation", unix.EPROTONOSUPPORT, "CONFIG_NF_TABLES"},
		{"read generation", unix.EAFNOSUPPORT, "CONFIG_NF_TABLES"},
		{"send transaction", unix.EMSGSIZE, "net.core.wmem_max"},
		{"rejected: add elements", unix.ENOMEM, "memory"},
		{"rejected: delete set", unix.ENOENT, ""},
		{"rejected: create set", unix.EBUSY, ""},
		{"rejected: create rule", unix.ERESTART, ""},
	} {
		err := fmt.Errorf("apply: %w", fmt.Errorf("%s: %w", tt.what, &netlink.OpError{Op: "receive", Err: tt.errno}))
		if op, rejected := strings.CutPrefix(tt.what, "rejected: "); rejected {
			err = fmt.Errorf("apply: %w", &nfnetlink.RejectedError{Op: nfnetlink.Op(op), Err: tt.errno})
		}
		rejected := tt.errno == unix.EMSGSIZE || strings.HasPrefix(tt.what, "rejected: ")
		if Rejected(err) != rejected || Rejected(fmt.Errorf("%w: %w", nfnetlink.ErrBusy, err)) {
			t.Errorf("%v: is rejected %t, want %t", err, Rejected(err), rejected)
		}
		if got := Hint(err); !strings.Contains(got, tt.names) || (tt.names == "") != (got == "") {
			t.Errorf("%v: hint %q, want one with %q", err, got, tt.names)
		}
	}
}

func TestCountersAreReadWhileTheKernelIsBusy(t *testing.T) {
	for _, m := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		want := cases.Load(t, "default").Compile(m)
		apply(t, open(t, ns), want, nft.Contents)
		f := &faults{dial: dialIn(ns)}
		k := f.open()
		f.before = func(call, []netlink.Message) { // the request of a read that has begun
			f.before = nil
			if counts, err := k.Counters(want.Layout); err != nil || len(counts) == 0 {
				t.Errorf("mode %s: %v, %v", m, counts, err)
			}
		}
		if apply(t, k, want, nft.Contents); f.before != nil {
			t.Error("nothing was read")
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	}
}

// The kernel counts elements since Linux 6.18: one that is added or deleted is found by the check of rules, which reads
// no elements of sets with the right number.
func TestNumberOfElementsIsComparedInAFrame(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	reads := 0
	k := (&faults{dial: dialIn(ns), before: func(_ call, msgs []netlink.Message) {
		if msgs[0].Header.Type == netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM) {
			reads++
		}
	}}).open()
	c := connect(t, ns)
	for _, list := range []string{
		"0.0.0.0/0", "224.0.0.0/3", "255.255.255.255/32", "0.0.0.0/8 1.0.0.0/8", "10.0.0.0/8 11.0.0.0/9 240.0.0.0/4",
		"10.0.0.0/8 ::/0", "10.0.0.0/8 fd00::/8 ff00::/8",
	} {
		want := nft.Compile(config.Config{
			NonMasqueradeCIDRs: cases.CIDRs(strings.Fields(list)...), MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
			PortsPerPod: 500, EnableIPv6: true, MasqLinkLocal: true, MasqLinkLocalIPv6: true,
		}, nft.Options{Layout: native.Layout{}})
		apply(t, k, want, nft.Contents)
		sets, err := c.Sets(nfnetlink.Inet, nft.TableName)
		nfttest.NoError(t, err)
		if !sets[0].Counted {
			t.Skip("this kernel does not count")
		}
		reads = 0
		if diffs := apply(t, k, want, nft.Frame); len(diffs) > 0 || reads > 0 {
			t.Errorf("%s: a frame has the differences %q after %d reads of elements", list, diffs, reads)
		}
		for _, does := range []string{
			"add element TABLE masq-src-v4-? { 192.0.2.0/24 }", "delete element TABLE masq-src-v4-? { 10.244.0.0/16 }",
			"flush set TABLE masq-src-v4-?", "delete element TABLE ports-by-pod-v4-? { 0.0.0.7 }",
		} {
			attack(t, ns, does)
			if diffs := apply(t, k, want, nft.Frame); len(diffs) == 0 {
				t.Errorf("%s, %s: a frame has no difference", list, does)
			}
			inSync(t, ns, want)
		}
	}
}

// A chain with our name is ours, whoever wrote it: it is replaced at every start, and named.
func TestChainOfAnotherProgramIsReplaced(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	loadForeign(t, ns)
	before := notOurs(t, ns, cases.DefaultChain)
	want := cases.Load(t, "both-families").Compile(nft.ModeIPTables)
	for _, restarts := range []bool{true, true, false} {
		k := open(t, ns)
		if !restarts {
			apply(t, k, want, nft.Contents)
		}
		iptables(t, ns, nfnetlink.IPv6, "-N", "X") // which may exist
		nfttest.NFT(t, ns, "add chain ip6 nat "+cases.DefaultChain+"; flush chain ip6 nat "+cases.DefaultChain, "-f", "-")
		iptables(t, ns, nfnetlink.IPv6, "-X", "X")
		iptables(t, ns, nfnetlink.IPv6, "-A", cases.DefaultChain, "-d", "2001:db8::/32", "-j", "ACCEPT")
		a, err := k.Apply(t.Context(), want, nft.Contents)
		says := []string{"table ip6 nat: chain IP-MASQ-AGENT has 1 rules, none of which this agent wrote"}
		nfttest.NoError(t, err)
		nfttest.Same(t, "replaced (-want +got)", says, a.Overwritten)
		inSync(t, ns, want)
		nfttest.Same(t, "what is not ours (-before +after)", before, notOurs(t, ns, cases.DefaultChain))
	}
}

// What a killed trace left is removed; the table of one that runs is not.
func TestTableOfAnAbandonedTraceIsRemoved(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	leave := func() { nfttest.NFT(t, ns, "", "add", "table", "inet", TraceTable) }
	locked := func() io.Closer { return nfttest.In(t, ns, LockTrace) }
	cleanUp := func(removal Removal, want ...string) {
		t.Helper()
		removed := nfttest.In(t, ns, func() ([]string, error) { return k.Cleanup(t.Context(), removal) })
		nfttest.Same(t, "removed (-want +got)", want, removed)
	}
	cleanUp(WithOlder)
	leave()
	for removal, want := range map[Removal][]string{Ours: {traceName}, WithOlder: {traceName}, OlderOnly: nil} {
		found, err := k.Removable(t.Context(), removal)
		nfttest.NoError(t, err)
		nfttest.Same(t, "removable (-want +got)", want, found)
	}
	lock := locked()
	cleanUp(Ours)
	nfttest.NoError(t, lock.Close())
	cleanUp(OlderOnly)
	cleanUp(Ours, traceName)
	lock = locked()
	nfttest.NoError(t, lock.Close())
	leave()
	nfttest.In(t, ns, func() (Applied, error) {
		return k.Apply(t.Context(), cases.Load(t, "default").Compile(nft.ModeNFTables), nft.WithLeftovers)
	})
	cleanUp(Ours, "table inet "+nft.TableName)
}

func TestEachKernelFindsLegacyTables(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-legacy")
	ns := nfttest.NewNS(t, "node")
	nfttest.Run(t, ns, "", "iptables-legacy", "-t", "nat", "-N", cases.DefaultChain)
	k := Open()
	t.Cleanup(func() { _ = k.Close() })
	want := []xtables.LegacyTable{{Family: nfnetlink.IPv4, Table: xtables.NATTable, Older: true}}
	for _, k := range []*Kernel{k, k.Another()} {
		nfttest.Same(t, "tables (-want +got)", want, nfttest.In(t, ns, k.LegacyTables))
	}
}

func TestRejectedTransactionIsAnErrorAndChangesNothing(t *testing.T) {
	for _, mode := range cases.Modes() {
		ns := nfttest.NewNS(t, "node")
		before := cases.Load(t, "default").Compile(mode)
		apply(t, open(t, ns), before, nft.Contents)
		after := cases.Load(t, "all-policies").Compile(mode)
		k := (&faults{dial: dialIn(ns), at: 1, fault: fault{rejecting, unix.EINVAL}}).open()
		if _, err := k.Apply(t.Context(), after, nft.Contents); !Rejected(err) {
			t.Errorf("mode %s: %v, want a rejection", mode, err)
		}
		inSync(t, ns, before)
	}
}
