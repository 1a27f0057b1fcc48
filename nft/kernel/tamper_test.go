package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// A tampering is what somebody does to our rules.
type tampering struct {
	name  string
	do    func(*attacker)
	finds string // a part of what Diff says
}

// An attacker does it, with the usual programs.
type attacker struct {
	t     *testing.T
	ns    *nfttest.NS
	table string
	set   string // the name under which the set of IPv4 destinations is held
	first netip.Prefix
	want  nft.Ruleset
}

// nft runs a transaction. TABLE stands for our table, SET for the set.
func (a *attacker) nft(text string) {
	a.t.Helper()
	nfttest.NFT(a.t, a.ns, strings.NewReplacer("TABLE", a.table, "SET", a.set, "FIRST", a.first.String()).Replace(text), "-f", "-")
}

func does(text string) func(*attacker) { return func(a *attacker) { a.nft(text) } }

// rule gives the handle of the n-th rule of our base chain, from the end where n
// is below zero.
func (a *attacker) rule(n int) uint64 {
	a.t.Helper()
	rules, err := connect(a.t, a.ns).Rules(nfnetlink.Inet, nft.TableName, nft.BaseChain)
	if err != nil {
		a.t.Fatal(err)
	}
	if n < 0 {
		n += len(rules)
	}
	return rules[n].Handle
}

// catchAll adds the element that holds every address beside the others. nft
// 1.0.6 does not know how to add it to a set of intervals.
func (a *attacker) catchAll() {
	a.t.Helper()
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	flags, _ := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_FLAGS, Data: binary.BigEndian.AppendUint32(nil, catchAll)},
	})
	element, _ := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_LIST_ELEM | unix.NLA_F_NESTED, Data: flags}})
	list, _ := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(nft.TableName), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(a.set), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_ELEMENTS | unix.NLA_F_NESTED, Data: element},
	})
	message := func(typ netlink.HeaderType, flags netlink.HeaderFlags, head, body []byte) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: typ, Flags: netlink.Request | flags}, Data: append(head, body...)}
	}
	nl, err := dialIn(a.ns)()
	if err != nil {
		a.t.Fatal(err)
	}
	defer nl.Close()
	_, err = nl.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}, nil),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM, netlink.Create|netlink.Acknowledge, []byte{unix.NFPROTO_INET, 0, 0, 0}, list),
		message(unix.NFNL_MSG_BATCH_END, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}, nil),
	})
	if err != nil {
		a.t.Fatal(err)
	}
	_, err = nl.Receive()
	switch {
	case errors.Is(err, unix.EINVAL):
		a.t.Logf("no element for everything in this kernel (it came with Linux 5.13): %v", err)
		a.nft("add element TABLE SET { 8.8.8.0/24 }")
	case err != nil:
		a.t.Fatal(err)
	}
}

// flowtable adds a flowtable and a rule that fills it, where the kernel has
// flowtables, and an empty chain in any case.
func (a *attacker) flowtable() {
	a.nft("add chain TABLE forward { type filter hook forward priority 0; }")
	const text = "add flowtable inet nft-masq-agent fast { hook ingress priority 0; devices = { lo }; }"
	if _, err := a.ns.Output(text, "nft", "-f", "-"); err != nil {
		a.t.Logf("no flowtables in this kernel: %v", err)
		return
	}
	a.nft("add rule TABLE forward meta l4proto tcp flow add @fast")
}

// firewalldReload is what firewalld does when it reloads with the flush that it
// does by default up to version 0.9, in one transaction.
const firewalldReload = `flush ruleset
table inet firewalld {
	chain filter_INPUT { type filter hook input priority 10; ct state established,related accept; ct status dnat accept; iifname "lo" accept; reject with icmpx admin-prohibited; }
	chain nat_POSTROUTING { type nat hook postrouting priority 110; jump nat_POST_public; }
	chain nat_POST_public { }
}
`

var ownTamperings = []tampering{
	{"flush ruleset", does("flush ruleset"), "is missing"},
	{"firewalld reload", does(firewalldReload), "is missing"},
	{"delete table", does("delete table TABLE"), "is missing"},
	{"empty table", does("delete table TABLE; add table TABLE"), "chain postrouting is missing"},
	{"flush chain", does("flush chain TABLE postrouting"), "lacks the rule"},
	{"flush table", does("flush table TABLE"), "lacks the rule"},
	{"delete chain", does("flush chain TABLE postrouting; delete chain TABLE postrouting"), "chain postrouting is missing"},

	{"flush set", does("flush set TABLE SET"), "lacks "},
	{"add element", does("add element TABLE SET { 198.51.100.8 }"), "holds 198.51.100.8, which is not in the config"},
	{"add element at the end", does("add element TABLE SET { 255.255.255.255 }"), "holds 255.255.255.255"},
	{"delete element", does("delete element TABLE SET { FIRST }"), "lacks 10.0.0.0/24"},
	{"exchange element", does("delete element TABLE SET { FIRST }; add element TABLE SET { 8.8.8.0/24 }"), "holds 8.8.8.0/24"},
	{"narrow element", does("delete element TABLE SET { FIRST }; add element TABLE SET { 10.0.0.0/25 }"), "holds 10.0.0.0/25 instead of 10.0.0.0/24"},
	{"widen element", does("delete element TABLE SET { FIRST }; add element TABLE SET { 9.255.255.0-10.0.0.255 }"), "holds 9.255.255.0-10.0.0.255"},
	{"element for everything", (*attacker).catchAll, "which is not in the config"},

	{"add rule", does("add rule TABLE postrouting ip daddr 198.51.100.8 return"), "has a rule beyond: meta nfproto ipv4 ip daddr 198.51.100.8 return"},
	{"insert rule", does("insert rule TABLE postrouting accept"), "has a rule beyond: accept"},
	{"add rule with a set of its own", does("add rule TABLE postrouting ip daddr { 198.51.100.8, 198.51.100.9 } return"), "has a rule beyond"},
	{"add rule with a chain of its own", does("add rule TABLE postrouting jump { counter; }"), "has a rule beyond"},
	{"add rule for our set", does("insert rule TABLE postrouting ip saddr @SET accept"), "has a rule beyond"},
	{"double rule", func(a *attacker) { a.nft("add rule TABLE postrouting ip daddr @SET counter name exempt-v4 return") }, "has a rule beyond"},
	{"replace rule", func(a *attacker) { a.nft(fmt.Sprintf("replace rule TABLE postrouting handle %d accept", a.rule(1))) }, "has a rule beyond: accept"},
	{"delete rule", func(a *attacker) { a.nft(fmt.Sprintf("delete rule TABLE postrouting handle %d", a.rule(-1))) }, "lacks the rule"},
	{"move rule", func(a *attacker) {
		a.nft(fmt.Sprintf("delete rule TABLE postrouting handle %d; add rule TABLE postrouting ip daddr @SET counter name exempt-v4 return", a.rule(1)))
	}, "in another order"},
	{"change comment", func(a *attacker) {
		a.nft(fmt.Sprintf(`replace rule TABLE postrouting handle %d meta nfproto ipv6 counter name masqueraded-v6 masquerade fully-random comment "config 00000000"`, a.rule(-1)))
	}, "lacks the rule"},
	{"change switch", func(a *attacker) {
		a.nft(fmt.Sprintf(`replace rule TABLE postrouting handle %d meta nfproto ipv4 counter name masqueraded-v4 masquerade`, a.rule(2)))
	}, "lacks the rule"},

	{"add set", does("add set TABLE foreign { type ipv4_addr; elements = { 1.1.1.1 }; }"), "set foreign is not of the config"},
	{"add the other side", does("add set TABLE non-masq-v4-a { type ipv4_addr; flags interval; }; add set TABLE non-masq-v4-b { type ipv4_addr; flags interval; }"), "is not of the config"},
	{"use the other side", does("add set TABLE non-masq-v4-a { type ipv4_addr; flags interval; }; add set TABLE non-masq-v4-b { type ipv4_addr; flags interval; }; insert rule TABLE postrouting ip daddr @non-masq-v4-a ip daddr @non-masq-v4-b accept"), "is not of the config"},
	{"other kind of set", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type ether_addr; }"), "is missing"},
	{"set with a timeout", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type ipv4_addr; flags interval, timeout; }"), "is missing"},
	{"set without comment", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type ipv4_addr; flags interval; }"), "is missing"},
	{"add chain", does("add chain TABLE foreign"), "chain foreign is not of the config"},
	{"jump to a chain", does("add chain TABLE foreign { accept; }; insert rule TABLE postrouting jump foreign"), "chain foreign is not of the config"},
	{"chain that uses our set", does("add chain TABLE foreign { type filter hook forward priority 0; }; add rule TABLE foreign ip daddr @SET drop"), "chain foreign is not of the config"},
	{"chain before ours", does("add chain TABLE before { type nat hook postrouting priority 0; accept; }"), "chain before is not of the config"},
	{"map of verdicts", does("add chain TABLE one { accept; }; add map TABLE verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : goto one }; }; insert rule TABLE postrouting ip daddr vmap @verdicts"), "set verdicts is not of the config"},
	{"chains in a ring of maps", does("add chain TABLE one; add map TABLE verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : jump one }; }; add rule TABLE one ip saddr 1.1.1.1 return; insert rule TABLE postrouting ip daddr vmap @verdicts"), "chain one is not of the config"},
	{"add counter", does("add counter TABLE foreign"), "object foreign is not of the config"},
	{"add quota", does("add quota TABLE masqueraded-v4 { over 10 mbytes; }"), "object masqueraded-v4 is not of the config"},
	{"limit in a rule", does("add limit TABLE slow { rate 10/second; }; insert rule TABLE postrouting limit name slow accept"), "object slow is not of the config"},
	{"delete counters", does("flush chain TABLE postrouting; delete counter TABLE local-v4; delete counter TABLE masqueraded-v6"), "counters are missing: local-v4, masqueraded-v6"},
	{"flowtable", (*attacker).flowtable, "is not of the config"},

	{"policy", does("add chain TABLE postrouting { policy drop; }"), "another policy than accept"},
	{"priority", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type nat hook postrouting priority 50; }"), "priority 50"},
	{"hook", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type nat hook output priority 110; counter; }"), "not nat hook postrouting priority 110"},
	{"type", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type filter hook postrouting priority 110; }"), "filter hook postrouting"},
	{"no hook", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { accept; }; add chain TABLE foreign { type filter hook output priority 0; jump postrouting; }"), "no hook"},
	{"dormant", does("add table TABLE { flags dormant; }"), "is dormant"},
	{"dormant at another priority", func(a *attacker) {
		a.nft("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type nat hook postrouting priority 50; }")
		a.nft("add table TABLE { flags dormant; }")
	}, "is dormant"},
	{"dormant and another chain", does("add chain TABLE foreign { type filter hook output priority 0; }; add table TABLE { flags dormant; }"), "is dormant"},
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

func TestTamperingWithOurTableIsFoundAndUndone(t *testing.T) {
	nfttest.Require(t, "nft", "iptables-nft-restore")
	for _, n := range []int{10, 1000} {
		t.Run(fmt.Sprintf("%d CIDRs", n), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			loadForeign(t, ns)
			c := tamperConfig(n)
			want := nft.Compile(c, nft.Options{Mode: nft.ModeNFTables, RandomFully: true})
			k := open(t, ns)
			apply(t, k, want, Look{})
			for _, tamper := range ownTamperings {
				t.Run(tamper.name, func(t *testing.T) {
					a := &attacker{t: t, ns: ns, table: "inet " + nft.TableName, set: liveSet(t, ns), first: c.NonMasqueradeCIDRs[0].Prefix}
					tamper.do(a)
					undo(t, ns, k, want, tamper.finds)
				})
			}
		})
	}
}

// liveSet gives the name under which the set of IPv4 destinations is held.
func liveSet(t *testing.T, ns *nfttest.NS) string {
	t.Helper()
	sets, err := connect(t, ns).Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(sets, func(s nfnetlink.Set) bool { return strings.HasPrefix(s.Name, "non-masq-v4") })
	return sets[i].Name
}

// undo holds that Diff names a tampering, that Apply undoes it and nothing of
// anybody else, and that then nothing is left to do.
func undo(t *testing.T, ns *nfttest.NS, k *Kernel, want nft.Ruleset, finds string) {
	t.Helper()
	foreign, listing := foreignRules(t, ns), foreignListing(t, ns)
	diffs, err := k.Diff(want, Look{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(diffs, func(d string) bool { return strings.Contains(d, finds) }) {
		t.Errorf("Diff says %q, nothing with %q", diffs, finds)
	}
	a, err := k.Apply(want, Look{})
	if err != nil {
		nfttest.NFT(t, ns, "flush ruleset", "-f", "-") // the next one starts afresh
		t.Errorf("Apply: %v", err)
		return
	}
	if diff := cmp.Diff(diffs, a.Differences); diff != "" {
		t.Errorf("Apply undid (-found +undone):\n%s", diff)
	}
	inStep(t, ns, want)
	if diff := cmp.Diff(foreign, foreignRules(t, ns)); diff != "" {
		t.Errorf("foreign rules (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(listing, foreignListing(t, ns)); diff != "" {
		t.Errorf("foreign tables (-before +after):\n%s", diff)
	}
}

// sharedTamperings are for the chain in the tables that iptables shows.
var sharedTamperings = []tampering{
	{"flush ruleset", does("flush ruleset"), "has no chain POSTROUTING"},
	{"firewalld reload", does(firewalldReload), "has no chain POSTROUTING"},
	{"delete table", does("delete table ip nat"), "table ip nat has no chain POSTROUTING"},
	{"delete table of IPv6", does("delete table ip6 nat"), "table ip6 nat has no chain POSTROUTING"},
	{"iptables -F", runs("-F"), "has no jump to IP-MASQ-AGENT"},
	{"iptables -F -X", runs("-F", "-X"), "has no chain POSTROUTING"},
	{"iptables -F POSTROUTING", runs("-F POSTROUTING"), "has no jump to IP-MASQ-AGENT"},
	{"iptables -F of our chain", runs("-F IP-MASQ-AGENT"), "lacks the rule"},
	{"iptables -A", runs("-A IP-MASQ-AGENT -d 198.51.100.8 -j RETURN"), "has a rule beyond"},
	{"iptables -I", runs("-I IP-MASQ-AGENT -j ACCEPT"), "has a rule beyond"},
	{"iptables -D", runs("-D IP-MASQ-AGENT 3"), "lacks the rule"},
	{"iptables -R", runs("-R IP-MASQ-AGENT 3 -d 198.51.100.8 -j RETURN"), "lacks the rule"},
	{"iptables -D of the last", (*attacker).deleteLast, "lacks the rule"},
	{"iptables -D of the jump", (*attacker).deleteJump, "has no jump to IP-MASQ-AGENT"},
	{"iptables -A of a jump", runs("-A POSTROUTING -j IP-MASQ-AGENT"), "other jumps to IP-MASQ-AGENT"},
	{"iptables -N of a chain that we would use", runs("-N IP-MASQ-AGENT-SRC"), "chain IP-MASQ-AGENT-SRC is not of the config"},
	{"native rule", does("insert rule ip nat IP-MASQ-AGENT accept"), "has a rule beyond"},
	{"native set in a rule", does("insert rule ip nat IP-MASQ-AGENT ip daddr { 198.51.100.8, 198.51.100.9 } return"), "has a rule beyond"},
	{"move rule", (*attacker).moveShared, "in another order"},
	{"dormant", does("add table ip nat { flags dormant; }"), "is dormant"},
	{"table of the other mode", func(a *attacker) {
		a.nft("table TABLE { chain postrouting { type nat hook postrouting priority 110; masquerade; }; }")
	}, "of mode nftables is left"},
}

// runs gives the attack that runs iptables, once for each line.
func runs(lines ...string) func(*attacker) {
	return func(a *attacker) {
		a.t.Helper()
		for _, l := range lines {
			iptables(a.t, a.ns, nfnetlink.IPv4, strings.Fields(l)...)
		}
	}
}

// rewrite runs iptables with a rule of ours.
func (a *attacker) rewrite(r nft.Rule, args ...string) {
	a.t.Helper()
	iptables(a.t, a.ns, nfnetlink.IPv4, append(args, shellWords(r.String())...)...)
}

func (a *attacker) deleteJump() {
	a.rewrite(a.want.Tables[0].Chain(nft.Postrouting).Rules[0], "-D", nft.Postrouting)
}

func (a *attacker) deleteLast() {
	rules := a.want.Tables[0].Chain(cases.DefaultChain).Rules
	a.rewrite(rules[len(rules)-1], "-D", cases.DefaultChain)
}

func (a *attacker) moveShared() {
	first := a.want.Tables[0].Chain(cases.DefaultChain).Rules[0]
	a.rewrite(first, "-D", cases.DefaultChain)
	a.rewrite(first, "-I", cases.DefaultChain, "4")
}

func TestTamperingWithTheSharedTablesIsFoundAndUndone(t *testing.T) {
	nfttest.Require(t, "nft", "iptables-nft")
	for _, n := range []int{10, 1000} {
		t.Run(fmt.Sprintf("%d CIDRs", n), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			loadForeign(t, ns)
			want := xtOf(tamperConfig(n))
			k := open(t, ns)
			apply(t, k, want, Look{})
			for _, tamper := range sharedTamperings {
				t.Run(tamper.name, func(t *testing.T) {
					tamper.do(&attacker{t: t, ns: ns, table: "inet " + nft.TableName, want: want})
					undo(t, ns, k, want, tamper.finds)
				})
			}
		})
	}
}
