package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
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
	o := nft.Options{Layout: cases.Layout(mode, cases.DefaultChain)}
	from := of(10)
	if mode == nft.ModeNFTables {
		from.SNATAddresses = cases.CIDRs("198.51.100.8/31")
	}
	return nft.Compile(from, o).
			WithAddresses(cases.Addrs("198.51.100.8", "198.51.100.9")),
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
				apply(t, open(t, ns), before, nft.Contents)
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
				a, err := k.Apply(t.Context(), after, nft.Contents)
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
	nfttest.SkipIfShort(t) // it waits until the agent gives up
	change := func(k *Kernel, after nft.Ruleset) error {
		_, err := k.Apply(t.Context(), after, nft.WithLeftovers)
		return err
	}
	cleanup := func(k *Kernel, _ nft.Ruleset) error {
		_, err := k.Cleanup(t.Context(), Ours)
		return err
	}
	for _, tt := range []struct {
		name string
		mode nft.Mode
		do   func(k *Kernel, after nft.Ruleset) error
	}{
		{"change of the table", nft.ModeNFTables, change},
		{"change of the chain", nft.ModeIPTables, change},
		{"cleanup", nft.ModeIPTables, cleanup}, // our own table can be deleted at any time
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			before, after := neighborConfigs(tt.mode, 10)
			apply(t, open(t, ns), before, nft.Contents)
			if tt.mode == nft.ModeIPTables { // then the jump to the old chain is deleted
				after.Layout = xtables.Layout{ChainName: "ANOTHER"}
				after.Tables = after.Layout.Compile(after.Policy, after.Hash())
			}
			commit := commits(t, ns)
			k := nextTo(t, ns, func(tr transaction) {
				if tr.guarded() {
					time.Sleep(650 * time.Millisecond) // so that the fewest attempts take as long as it tries
					commit()
				}
			})
			err := tt.do(k, after)
			if !errors.Is(err, nfnetlink.ErrBusy) || !Delayed(err) || Rejected(err) || Hint(err) != "" {
				t.Errorf("%v, rejected %t, hint %q", err, Rejected(err), Hint(err))
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
		"add set TABLE x { type ipv4_addr; timeout 1h; }":                      true,
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
			apply(t, k, want, nft.Contents)
			if _, err := ns.Output(strings.ReplaceAll(does, "TABLE", "inet "+nft.TableName), "nft", "-f", "-"); err != nil {
				if strings.Contains(err.Error(), "not supported") { // in sets of intervals, Linux 6.1
					return
				}
				t.Fatal(err)
			}
			if a, err := k.Apply(t.Context(), want, nft.Contents); err != nil || a.Recreated != replaced {
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
			apply(t, open(t, ns), before, nft.Contents)
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
				if err := other.Commit(b); err != nil {
					t.Error(err)
				}
			}}).open()
			a, err := k.Apply(t.Context(), after, nft.Contents)
			if err != nil || a.Recreated {
				t.Errorf("%+v, %v", a, err)
			}
			inSync(t, ns, after)
		})
	}
}

// The kernel counts what a transaction adds before it is finished, and lists it afterwards. That is no reason to
// replace our table, nor to reject a change.
func TestUnfinishedTransactionIsAwaited(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			before, after := neighborConfigs(mode, 10)
			k, other, looks := open(t, ns), connect(t, ns), connect(t, ns)
			apply(t, k, before, nft.Contents)
			b, table := &nfnetlink.Batch{}, before.Tables[0]
			count := func() uint32 {
				c, err := looks.Chain(table.Family, table.Name, xtables.Postrouting)
				if mode == nft.ModeNFTables {
					var of nfnetlink.Table
					of, err = looks.Table(table.Family, table.Name)
					c.Use = of.Use
				}
				nfttest.NoError(t, err)
				return c.Use
			}
			if mode == nft.ModeNFTables {
				b.AddSet(table.Sets[0].KernelSet(table, table.Sets[0].Name+nft.SideB))
			} else {
				b.AddRule(nfnetlink.Rule{Family: table.Family, Table: table.Name, Chain: xtables.Postrouting})
			}
			b.AddTable(nfnetlink.Inet, "other") // the rest of the transaction takes long
			set := nfnetlink.Set{
				Family: nfnetlink.Inet, Table: "other", Name: "s", Flags: unix.NFT_SET_INTERVAL, KeyType: 7, KeyLen: 4,
			}
			b.AddSet(set)
			many := make([]netip.Prefix, 50_000)
			for i := range many {
				many[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 15), byte(i >> 7), byte(i << 1)}), 32)
			}
			b.AddElements(set.Family, set.Table, set.Name, many)
			was, done := count(), make(chan error, 1)
			go func() { done <- other.Commit(b) }()
			for count() == was {
			}
			a, err := k.Apply(t.Context(), after, nft.Contents)
			if failed := <-done; failed != nil || err != nil || a.Recreated {
				t.Fatalf("%v; recreated %t, %v", failed, a.Recreated, err)
			}
			inSync(t, ns, after)
		})
	}
}

// A busyNode is a Kernel of a namespace; while busy is set, another program commits to its own
// table as often as a long list of ours is read.
type busyNode struct {
	*Kernel
	ns    *nfttest.NS
	busy  *bool
	lists map[netlink.HeaderType]int
}

func newBusyNode(t *testing.T, ns *nfttest.NS) *busyNode {
	t.Helper()
	commit, n := commits(t, ns), &busyNode{ns: ns, busy: new(bool), lists: map[netlink.HeaderType]int{}}
	n.Kernel = (&faults{dial: dialIn(ns), after: func(_ call, msgs []netlink.Message, _ error) {
		m := msgs[0]
		kind := m.Header.Type & 0xff
		has := func(name string) bool { return bytes.Contains(m.Data, []byte(name)) }
		// A list of the destinations of IPv4: the elements of the set, or the rules of the chain.
		if *n.busy && m.Header.Flags&netlink.Dump == netlink.Dump && (kind == unix.NFT_MSG_GETSETELEM && has("non-masq-v4") ||
			kind == unix.NFT_MSG_GETRULE && has(cases.DefaultChain+"\x00") && m.Data[0] == unix.AF_INET) {
			n.lists[kind]++
			commit()
		}
	}}).open()
	return n
}

// A busyStep is what happens to our rules, and what is wanted then.
type busyStep struct {
	name  string
	do    func()
	want  nft.Ruleset
	depth nft.Depth
}

// areDone carries out steps, and then a removal, while another program commits. A difference
// counts if two reads agree; after that the long list, of a kind, is not read again.
func (n *busyNode) areDone(t *testing.T, kind netlink.HeaderType, most int, last Removal, steps []busyStep) {
	t.Helper()
	for _, step := range steps {
		step.do()
		clear(n.lists)
		*n.busy = true
		a, err := n.Apply(t.Context(), step.want, step.depth)
		*n.busy = false
		if err != nil || len(a.Differences) == 0 {
			t.Errorf("%s: Apply found %q, %v", step.name, a.Differences, err)
		}
		if n := n.lists[kind]; n > most {
			t.Errorf("%s: %d lists", step.name, n)
		}
		inSync(t, n.ns, step.want)
	}
	*n.busy = true
	if removed, err := n.Cleanup(t.Context(), last); err != nil || len(removed) == 0 {
		t.Errorf("Cleanup removed %q, %v", removed, err)
	}
}

// A large set is changed, restored, and removed, although every read of it takes longer than
// the time between another program's transactions.
func TestLargeSetsAreChangedRestoredAndRemovedNextToACommittingProgram(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // reads and writes them often
	nfttest.Require(t, "nft")
	compile := func(more ...config.CIDR) nft.Ruleset {
		c := tamperConfig(10_500)
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, more...)
		return nft.Compile(c, nft.Options{Layout: native.Layout{}})
	}
	ns := nfttest.NewNS(t, "node")
	n := newBusyNode(t, ns)
	want := compile()
	apply(t, n.Kernel, want, nft.Contents)
	const exchange = "delete element TABLE non-masq-v4-? { 10.0.4.0/24 }; add element TABLE non-masq-v4-? { 8.8.8.0/24 }"
	attacks := func(script string) func() { return func() { attack(t, ns, script) } }
	n.areDone(t, unix.NFT_MSG_GETSETELEM, 4, WithOlder, []busyStep{
		{"another config", func() {}, compile(cases.CIDRs("203.0.113.0/25")...), nft.Contents},
		{"back, with all checks", func() {}, want, nft.TakeOver},
		{"one CIDR is exchanged", attacks(exchange), want, nft.Contents},
		{"one CIDR is exchanged, with all checks", attacks(exchange), want, nft.TakeOver},
		{"the table is gone", attacks("delete table TABLE"), want, nft.Contents},
	})
}

// So is a chain of as many rules as mode iptables-nft may have.
func TestManyRulesAreChangedRestoredAndRemovedNextToACommittingProgram(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // reads and writes them often
	nfttest.Require(t, "nft")
	const chain = "ip nat " + cases.DefaultChain
	want, other := neighborConfigs(nft.ModeIPTables, xtables.MaxCIDRs)
	ns := nfttest.NewNS(t, "node")
	n := newBusyNode(t, ns)
	apply(t, n.Kernel, want, nft.Contents)
	script := func(text string) func() {
		return func() { nfttest.NFT(t, ns, text, "-f", "-") }
	}
	first := func(chain string) func() {
		return func() {
			rules := rulesOf(t, connect(t, ns), nfnetlink.IPv4, xtables.NATTable, chain)
			script(fmt.Sprintf("delete rule ip nat %s handle %d", chain, rules[0].Handle))()
		}
	}
	n.areDone(t, unix.NFT_MSG_GETRULE, 2, Ours, []busyStep{
		{"another config", func() {}, other, nft.Contents},
		{"back, with all checks", func() {}, want, nft.TakeOver},
		{"the chain is flushed", script("flush chain " + chain), want, nft.Contents},
		{"a rule is deleted", first(cases.DefaultChain), want, nft.Contents},
		{"a rule is deleted, with all checks", first(cases.DefaultChain), want, nft.TakeOver},
		{"a rule is added", script("add rule " + chain + " accept"), want, nft.Contents},
		{"the jump is deleted", first(xtables.Postrouting), want, nft.Contents},
		{"the chain is renamed", script("rename chain " + chain + " x"), want, nft.Contents},
		{"the table is gone", script("delete table ip nat"), want, nft.Contents},
		{"the table is dormant", script("add table ip nat { flags dormant; }"), want, nft.Contents},
	})
}

// What an older agent left is looked for until two reads agree, and not between the attempts to write: reading the table
// takes longer than the time between another program's transactions. Mode iptables-nft also reads its own jumps.
func TestOlderAgentsAreRemovedNextToACommittingProgram(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore")
	for _, name := range []string{"ip-masq-agent-v2.9", "ip-masq-agent-custom-chain"} {
		agent := loadOlder(t, name)
		for _, way := range []struct {
			name  string
			do    func(context.Context, *Kernel) ([]string, error)
			lists int // of the rules of POSTROUTING
		}{
			{"nftables", applies(agent.takeOvers()[0].want, nft.TakeOver), 4},
			{"iptables-nft", applies(agent.takeOvers()[2].want, nft.TakeOver), 4 + 2*len(agent.takeOvers()[2].want.Tables)},
			{"--legacy", cleansUp(WithOlder), 2},
			{"--legacy-only", cleansUp(OlderOnly), 2},
		} {
			t.Run(name+", "+way.name, func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				loadForeign(t, ns)
				before := notOurs(t, ns, "TAKES-OVER")
				agent.install(t, ns, nil)
				commit, lists := commits(t, ns), 0
				k := (&faults{dial: dialIn(ns), after: func(_ call, msgs []netlink.Message, _ error) {
					m := msgs[0]
					if m.Header.Flags&netlink.Dump == netlink.Dump && bytes.Contains(m.Data, []byte(xtables.Postrouting+"\x00")) {
						lists++
						commit()
					}
				}}).open()
				removed, err := way.do(t.Context(), k)
				if err != nil || len(removed) == 0 || lists != way.lists {
					t.Errorf("removed %q, %v; POSTROUTING was listed %d times, want %d", removed, err, lists, way.lists)
				}
				nfttest.Same(t, "what is not ours (-before the agent +after)", before, notOurs(t, ns, "TAKES-OVER"))
			})
		}
	}
}

// commits returns what another program does that commits to its own table.
func commits(t *testing.T, ns *nfttest.NS) func() {
	t.Helper()
	other := connect(t, ns)
	return func() {
		var b nfnetlink.Batch
		b.AddTable(nfnetlink.Inet, "other")
		b.DelTable(nfnetlink.Inet, "other")
		if err := other.Commit(&b); err != nil {
			t.Error(err)
		}
	}
}

// Handles begin again when a table is created again: a rule of another program then has
// the one that was to be deleted.
func TestRulesThatTookTheHandlesOfOlderAgentsRulesStay(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	agent := loadOlder(t, "ip-masq-agent-v2.9")
	agent.withIPv6()
	takesOver := func(mode nft.Mode) func(context.Context, *Kernel) ([]string, error) {
		return applies(nft.Compile(agent.config, nft.Options{Layout: cases.Layout(mode, "TAKES-OVER")}), nft.TakeOver)
	}
	// The older agent is about to come back: its chain exists, and other rules.
	var reload strings.Builder
	for _, f := range []string{"ip", "ip6"} {
		fmt.Fprintf(&reload, "delete table %s nat; table %[1]s nat { chain IP-MASQ-AGENT { }; chain POSTROUTING { type "+
			"nat hook postrouting priority 100; ", f)
		for i := range 40 {
			fmt.Fprintf(&reload, "meta mark %d accept; ", i)
		}
		reload.WriteString("}; }\n")
	}
	for _, tt := range []struct {
		name         string
		transactions int // the last one deletes
		do           func(context.Context, *Kernel) ([]string, error)
	}{
		{"take-over in mode nftables", 2, takesOver(nft.ModeNFTables)},
		{"take-over in mode iptables-nft", 1, takesOver(nft.ModeIPTables)},
		{"cleanup --legacy", 1, cleansUp(WithOlder)},
		{"cleanup --legacy-only", 1, cleansUp(OlderOnly)},
	} {
		for _, reloads := range []bool{true, false} { // or else the control
			t.Run(fmt.Sprint(tt.name, ", reloads ", reloads), func(t *testing.T) {
				t.Parallel()
				ns := nfttest.NewNS(t, "node")
				agent.install(t, ns, nil)
				others := func() []string {
					return slices.DeleteFunc(notOurs(t, ns, "TAKES-OVER"), func(line string) bool {
						return strings.Contains(line, cases.DefaultChain)
					})
				}
				var before []string
				n := 0
				k := nextTo(t, ns, func(transaction) {
					if n++; n == tt.transactions && reloads {
						nfttest.NFT(t, ns, reload.String(), "-f", "-")
						before = others()
					}
				})
				if _, err := tt.do(t.Context(), k); err != nil || n < tt.transactions {
					t.Errorf("%v; %d transactions", err, n)
				}
				nfttest.Same(t, "what is not ours (-reloaded +left)", before, others())
			})
		}
	}
}

// A variant of our jump is deleted by its handle, which a rule of another program may have by then.
func TestRulesThatTookTheHandlesOfJumpsStay(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	ns := nfttest.NewNS(t, "node")
	want := xtOf(config.Default(config.Defaults{}))
	apply(t, open(t, ns), want, nft.Contents)
	iptables(t, ns, nfnetlink.IPv4, "-A", xtables.Postrouting, "-j", cases.DefaultChain)
	reload := "delete table ip nat; table ip nat { chain POSTROUTING { type nat hook postrouting priority 100; " +
		strings.Repeat("meta mark 7 accept; ", 40) + "}; }"
	once := sync.OnceFunc(func() { nfttest.NFT(t, ns, reload, "-f", "-") })
	k := nextTo(t, ns, func(transaction) { once() })
	if diffs := apply(t, k, want, nft.Contents); len(diffs) == 0 {
		t.Error("nothing was found")
	}
	inSync(t, ns, want)
	if left := strings.Count(nfttest.ListRuleset(t, ns), "meta mark 0x00000007"); left != 40 {
		t.Errorf("%d of 40 rules of another program are left", left)
	}
}

// What another agent of ours writes while cleanup plans goes, too.
func TestCleanupRemovesWhatComesBetweenItsAttempts(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	second := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: cases.Layout(nft.ModeIPTables, "SECOND")})
	apply(t, open(t, ns), xtOf(config.Default(config.Defaults{})), nft.Contents)
	once := sync.OnceFunc(func() { apply(t, open(t, ns), second, nft.Contents) })
	k := nextTo(t, ns, func(transaction) { once() })
	if removed, err := k.Cleanup(t.Context(), Ours); err != nil || len(removed) == 0 {
		t.Errorf("removed %q, %v", removed, err)
	}
	if left := nfttest.ListRuleset(t, ns); strings.Contains(left, "SECOND") || strings.Contains(left, cases.DefaultChain) {
		t.Errorf("left are\n%s", left)
	}
}
