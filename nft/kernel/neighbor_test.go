package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// A transaction is one of ours, before it is sent.
type transaction []netlink.Message

// guarded reports whether the kernel rejects it after another program's.
func (t transaction) guarded() bool { return len(t[0].Data) > 4 }

// count returns how many of its messages are of a kind.
func (t transaction) count(kind uint16) (n int) {
	for _, m := range t {
		if m.Header.Type == netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|kind) {
			n++
		}
	}
	return n
}

// nextTo opens a Kernel next to another program, which does something before each transaction.
func nextTo(t *testing.T, ns *nfttest.NS, do func(transaction)) *Kernel {
	k := (&faults{dial: dialIn(ns), before: func(c call, msgs []netlink.Message) {
		if c == callCommit {
			do(msgs)
		}
	}}).open()
	t.Cleanup(func() { _ = k.Close() })
	return k
}

// neighborConfigs returns configs of so many CIDRs, none of which is in both. In mode nftables
// the first one has a map, which goes a transaction after its rules.
func neighborConfigs(mode nft.Mode, n int) (before, after nft.Ruleset) {
	of := func(first byte) config.Config {
		c := config.Config{MasqLinkLocal: true}
		for i := range n {
			a := netip.AddrFrom4([4]byte{first + byte(i>>15), byte(i >> 7), byte(i << 1), 0}) // not adjacent
			c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: netip.PrefixFrom(a, 24)})
		}
		return c
	}
	o := nft.Options{Layout: layouts.Of(mode, cases.DefaultChain)}
	from := of(10)
	if mode == nft.ModeNFTables {
		from.SNATAddresses = cases.CIDRs("198.51.100.8/31")
	}
	return nft.Compile(from, o).
			On(cases.Addrs("198.51.100.8", "198.51.100.9")),
		nft.Compile(of(30), o)
}

// Another program that commits before each of our transactions but the third attempt to
// switch delays nothing else: no set is filled again, nothing that was deleted is tried again. In
// mode iptables-nft, our chains are right at any generation.
func TestChangeNextToAProgramThatCommitsIsDoneOnce(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		for _, n := range []int{10, 1_000, 10_000, 100_000}[:nfttest.Rounds(2, 3, 4)] {
			if mode == nft.ModeIPTables && n > 1_000 {
				continue
			}
			t.Run(fmt.Sprintf("%s, %d CIDRs", mode, n), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				before, after := neighborConfigs(mode, n)
				apply(t, open(t, ns), before, layout.Ours)
				commit, switches, fills, deletions := commits(t, ns), 0, 0, 0
				k := nextTo(t, ns, func(tr transaction) {
					if tr.guarded() {
						switches++
					} else {
						fills += tr.count(unix.NFT_MSG_NEWSETELEM)
						deletions += tr.count(unix.NFT_MSG_DELSET)
					}
					if !tr.guarded() || switches < 3 {
						commit()
					}
				})
				a, err := k.Apply(t.Context(), after, layout.Ours)
				if err != nil || len(a.Differences) == 0 || a.Recreated || a.Generation == generation(t, ns) {
					t.Errorf("%+v, %v", a, err)
				}
				attempts := 3
				if mode == nft.ModeIPTables {
					attempts = 0
				}
				if want := (n + 999) / 1000; switches != attempts || mode == nft.ModeNFTables && fills != want {
					t.Errorf("%d attempts to switch; %d messages with elements, want %d", switches, fills, want)
				}
				if want := 3; mode == nft.ModeNFTables && deletions != want { // two of addresses, one of destinations
					t.Errorf("%d sets were deleted afterwards, want %d", deletions, want)
				}
				inSync(t, ns, after)
			})
		}
	}
}

// What never comes through ends with an error that is no rejection, and changes nothing.
func TestChangeThatNeverComesThroughIsNotCalledARejection(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			before, after := neighborConfigs(mode, 10)
			apply(t, open(t, ns), before, layout.Ours)
			if mode == nft.ModeIPTables { // then the jump to the old chain is deleted
				after.Layout = xtables.Layout{Name: "ANOTHER"}
				after.Tables = after.Layout.Compile(after.Policy, after.Hash())
			}
			commit := commits(t, ns)
			k := nextTo(t, ns, func(tr transaction) {
				if tr.guarded() {
					commit()
				}
			})
			for _, do := range []func() error{
				func() error { _, err := k.Apply(t.Context(), after, layout.Everything); return err },
				func() error { _, err := k.Cleanup(t.Context(), Ours); return err },
			} {
				err := do()
				if !errors.Is(err, nfnetlink.ErrBusy) || !Delayed(err) || Refused(err) || Hint(err) != "" {
					t.Errorf("%v, refused %t, hint %q", err, Refused(err), Hint(err))
				}
			}
			if diffs := undecided(t, connect(t, ns), before); len(diffs) > 0 {
				t.Errorf("changed: %q", diffs)
			}
		})
	}
}

// A table with something that is not ours is replaced next to a program that commits, too, and
// so is one that a renamed chain is in, but in place.
func TestTableIsRepairedNextToAProgramThatCommits(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for does, replaced := range map[string]bool{
		"add quota TABLE x { over 10 mbytes; }":                                true,
		"add set TABLE x { type ipv4_addr; flags interval; ct count over 1; }": true,
		"add table TABLE { flags dormant; }":                                   true,
		"flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { accept; }; " +
			"add chain TABLE x { type filter hook output priority 0; jump postrouting; }": true,
		"add map TABLE x { type ipv4_addr : verdict; elements = { 192.0.2.1 : goto snat-v4 }; }": false,
		"rename chain TABLE postrouting x": false,
		"rename chain TABLE snat-v4 x":     false,
		"delete table TABLE":               false,
	} {
		t.Run(does, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			want, _ := neighborConfigs(nft.ModeNFTables, 10)
			commit, switches := commits(t, ns), 0
			k := nextTo(t, ns, func(tr transaction) {
				if tr.guarded() {
					switches++
				}
				if !tr.guarded() || switches%2 == 1 {
					commit()
				}
			})
			apply(t, k, want, layout.Ours)
			if _, err := ns.Output(strings.ReplaceAll(does, "TABLE", "inet "+nft.TableName), "nft", "-f", "-"); err != nil {
				if strings.Contains(err.Error(), "not supported") { // in sets of intervals, Linux 6.1
					return
				}
				t.Fatal(err)
			}
			if a, err := k.Apply(t.Context(), want, layout.Ours); err != nil || a.Recreated != replaced {
				t.Errorf("%+v, %v", a, err)
			}
			inSync(t, ns, want)
		})
	}
}

// Another agent that deletes a set between two lists of a read makes the table look as if it had something
// else, because the kernel has counted what it does not list. That is no reason to replace it.
func TestTableIsNotReplacedWhileAnotherAgentCreatesSets(t *testing.T) {
	t.Parallel()
	for _, lists := range []int{1, 2, 3, 5, 8} {
		t.Run(fmt.Sprint(lists, " lists"), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			before, after := neighborConfigs(nft.ModeNFTables, 10)
			apply(t, open(t, ns), before, layout.Ours)
			table := before.Tables[0]
			set := table.Sets[0].KernelSet(table, table.Sets[0].Name+nft.SideB)
			other, staged, seen := connect(t, ns), false, 0
			k := (&faults{dial: dialIn(ns), before: func(_ call, msgs []netlink.Message) {
				b := &nfnetlink.Batch{}
				switch kind := msgs[0].Header.Type & 0xff; {
				case kind == unix.NFT_MSG_GETTABLE && !staged && seen < lists:
					b.AddSet(set)
				case kind == unix.NFT_MSG_GETSET && staged:
					b.DelSet(set.Family, set.Table, set.Name)
					seen++
				default:
					return
				}
				staged = !staged
				if err := other.Commit(b, 0); err != nil {
					t.Error(err)
				}
			}}).open()
			a, err := k.Apply(t.Context(), after, layout.Ours)
			if err != nil || a.Recreated {
				t.Errorf("%+v, %v", a, err)
			}
			inSync(t, ns, after)
		})
	}
}
