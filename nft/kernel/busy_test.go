package kernel

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

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
	depth layout.Depth
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
	apply(t, n.Kernel, want, layout.Ours)
	const exchange = "delete element TABLE non-masq-v4-? { 10.0.4.0/24 }; add element TABLE non-masq-v4-? { 8.8.8.0/24 }"
	attacks := func(script string) func() { return func() { attack(t, ns, script) } }
	n.areDone(t, unix.NFT_MSG_GETSETELEM, 4, WithLegacy, []busyStep{
		{"another config", func() {}, compile(cases.CIDRs("203.0.113.0/25")...), layout.Ours},
		{"back, with all checks", func() {}, want, layout.TakeOver},
		{"one CIDR is exchanged", attacks(exchange), want, layout.Ours},
		{"one CIDR is exchanged, with all checks", attacks(exchange), want, layout.TakeOver},
		{"the table is gone", attacks("delete table TABLE"), want, layout.Ours},
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
	apply(t, n.Kernel, want, layout.Ours)
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
		{"another config", func() {}, other, layout.Ours},
		{"back, with all checks", func() {}, want, layout.TakeOver},
		{"the chain is flushed", script("flush chain " + chain), want, layout.Ours},
		{"a rule is deleted", first(cases.DefaultChain), want, layout.Ours},
		{"a rule is deleted, with all checks", first(cases.DefaultChain), want, layout.TakeOver},
		{"a rule is added", script("add rule " + chain + " accept"), want, layout.Ours},
		{"the jump is deleted", first(xtables.Postrouting), want, layout.Ours},
		{"the chain is renamed", script("rename chain " + chain + " x"), want, layout.Ours},
		{"the table is gone", script("delete table ip nat"), want, layout.Ours},
		{"the table is dormant", script("add table ip nat { flags dormant; }"), want, layout.Ours},
	})
}
