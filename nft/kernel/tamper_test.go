package kernel

import (
	"context"
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
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

// A tampering is a change that another program makes to our rules.
type tampering struct {
	name  string
	do    func(*attacker)
	finds string // a part of Diff's result
}

// An attacker makes the change, with the usual programs.
type attacker struct {
	t     *testing.T
	ns    *nfttest.NS
	table string
	set   string // the current name of the set of IPv4 destinations
	first netip.Prefix
	want  nft.Ruleset
}

// nft runs a transaction. TABLE stands for our table, SET for the set.
func (a *attacker) nft(text string) {
	a.t.Helper()
	nfttest.NFT(a.t, a.ns, strings.NewReplacer("TABLE", a.table, "SET", a.set, "FIRST", a.first.String()).Replace(text),
		"-f", "-")
}

func does(text string) func(*attacker) { return func(a *attacker) { a.nft(text) } }

// since is an attack that kernels reject before a version: the first one of those tried
// that accepted it, or the one that introduced what it uses.
func since(major, minor int, do func(*attacker)) func(*attacker) {
	return func(a *attacker) {
		if nfttest.KernelBefore(a.t, major, minor) {
			a.t.Skipf("kernels before %d.%d reject it", major, minor)
		}
		do(a)
	}
}

// rule returns the handle of the n-th rule of our base chain, counted from the
// end if n is negative.
func (a *attacker) rule(n int) uint64 {
	a.t.Helper()
	rules, _, err := connect(a.t, a.ns).FirstRules(nfnetlink.Inet, nft.TableName, native.BaseChain,
		func(nfnetlink.Rule) bool { return false })
	if err != nil {
		a.t.Fatal(err)
	}
	if n < 0 {
		n += len(rules)
	}
	return rules[n].Handle
}

// catchAll adds the element that matches every other address. nft 1.0.6 cannot
// add it to a set of intervals.
func (a *attacker) catchAll() {
	a.t.Helper()
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	err := a.elements([]netlink.Attribute{elementFlags(catchAll)})
	switch {
	case errors.Is(err, unix.EINVAL):
		a.t.Logf("this kernel has no catch-all element (since Linux 5.13): %v", err)
		a.nft("add element TABLE SET { 8.8.8.0/24 }")
	case err != nil:
		a.t.Fatal(err)
	}
}

// limited adds a limit to one element of a set without a common limit, which nft
// 1.0.6 rejects and the kernel accepts.
func (a *attacker) limited() {
	a.t.Helper()
	a.nft("delete element TABLE SET { FIRST }")
	r := iprange.Of(a.first)
	limit := nest(unix.NFTA_SET_ELEM_EXPR,
		netlink.Attribute{Type: unix.NFTA_EXPR_NAME, Data: []byte("limit\x00")},
		nest(unix.NFTA_EXPR_DATA,
			netlink.Attribute{Type: unix.NFTA_LIMIT_RATE, Data: binary.BigEndian.AppendUint64(nil, 1)},
			netlink.Attribute{Type: unix.NFTA_LIMIT_UNIT, Data: binary.BigEndian.AppendUint64(nil, 3600)}))
	err := a.elements(
		[]netlink.Attribute{elementKey(r.From), limit},
		[]netlink.Attribute{elementKey(r.To.Next()), elementFlags(unix.NFT_SET_ELEM_INTERVAL_END)})
	if err != nil {
		a.t.Fatal(err)
	}
}

func elementKey(addr netip.Addr) netlink.Attribute {
	return nest(unix.NFTA_SET_ELEM_KEY, netlink.Attribute{Type: unix.NFTA_DATA_VALUE, Data: addr.AsSlice()})
}

func elementFlags(flags uint32) netlink.Attribute {
	return netlink.Attribute{Type: unix.NFTA_SET_ELEM_FLAGS, Data: binary.BigEndian.AppendUint32(nil, flags)}
}

func nest(typ uint16, inner ...netlink.Attribute) netlink.Attribute {
	data, _ := netlink.MarshalAttributes(inner)
	return netlink.Attribute{Type: typ | unix.NLA_F_NESTED, Data: data}
}

// elements adds elements with any attributes to the set.
func (a *attacker) elements(elements ...[]netlink.Attribute) error {
	a.t.Helper()
	var listed []netlink.Attribute
	for _, e := range elements {
		listed = append(listed, nest(unix.NFTA_LIST_ELEM, e...))
	}
	list, _ := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(nft.TableName), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(a.set), 0)},
		nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, listed...),
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
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM, netlink.Create|netlink.Acknowledge,
			[]byte{unix.NFPROTO_INET, 0, 0, 0}, list),
		message(unix.NFNL_MSG_BATCH_END, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}, nil),
	})
	if err != nil {
		a.t.Fatal(err)
	}
	_, err = nl.Receive()
	return err
}

// likeOurs replaces the set by one that differs only in a line of its declaration.
func likeOurs(flags, line string) func(*attacker) {
	return func(a *attacker) {
		var held []string
		for _, p := range a.want.Tables[0].Sets[0].Prefixes {
			held = append(held, p.String())
		}
		a.nft("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type ipv4_addr; flags " + flags +
			"; comment \"destinations that see the pod's own address\"; " + line + " }; add element TABLE SET { " +
			strings.Join(held, ", ") +
			" }; insert rule TABLE postrouting ip daddr @SET counter name exempt-v4 return")
	}
}

// flowtable adds a flowtable and a rule that fills it, if the kernel has
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

// fillSpare creates the set that the next update would fill, with a rule that
// refers to it.
func (a *attacker) fillSpare() {
	spare := "non-masq-v4-a"
	if a.set == spare {
		spare = "non-masq-v4-b"
	}
	a.nft("add set TABLE " + spare +
		" { type ipv4_addr; flags dynamic; }; add chain TABLE foreign { type filter hook forward priority 0; }; add rule " +
		"TABLE foreign update @" + spare + " { ip daddr }; delete element TABLE SET { FIRST }")
}

// mapSpare creates a map of verdicts with the name that the next update of the
// set would use.
func (a *attacker) mapSpare() {
	spare := "non-masq-v4-a"
	if a.set == spare {
		spare = "non-masq-v4-b"
	}
	a.nft("add chain TABLE foreign { type filter hook forward priority 0; }; add chain TABLE one; add map TABLE " + spare +
		" { type ipv4_addr : verdict; elements = { 198.51.100.8 : goto one }; }; add rule TABLE foreign ip daddr vmap @" +
		spare + "; delete element TABLE SET { FIRST }")
}

// orphan assigns our table to a process that exited: it has no owner, and its flag
// cannot be changed.
func (a *attacker) orphan() {
	a.t.Helper()
	a.nft("delete table TABLE")
	owner := own(a.t, a.ns, nfnetlink.Inet, nft.TableName, flagOwner|flagPersist)
	if err := owner.Close(); err != nil {
		a.t.Fatal(err)
	}
}

// firewalldReload is a reload of firewalld with the flush that is its default up
// to version 0.9, in one transaction.
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
	{"flush chain", does("flush chain TABLE postrouting"), "missing rule"},
	{"flush table", does("flush table TABLE"), "missing rule"},
	{
		"delete chain", does("flush chain TABLE postrouting; delete chain TABLE postrouting"),
		"chain postrouting is missing",
	},

	{"flush set", does("flush set TABLE SET"), "lacks "},
	{"add element", does("add element TABLE SET { 198.51.100.8 }"), "contains 198.51.100.8, which is not in the config"},
	{"add element at the end", does("add element TABLE SET { 255.255.255.255 }"), "contains 255.255.255.255"},
	{"delete element", does("delete element TABLE SET { FIRST }"), "lacks 10.0.0.0/24"},
	{
		"exchange element", does("delete element TABLE SET { FIRST }; add element TABLE SET { 8.8.8.0/24 }"),
		"contains 8.8.8.0/24",
	},
	{
		"narrow element", does("delete element TABLE SET { FIRST }; add element TABLE SET { 10.0.0.0/25 }"),
		"contains 10.0.0.0/25 instead of 10.0.0.0/24",
	},
	{
		"widen element", does("delete element TABLE SET { FIRST }; add element TABLE SET { 9.255.255.0-10.0.0.255 }"),
		"contains 9.255.255.0-10.0.0.255",
	},
	{"element for everything", (*attacker).catchAll, "which is not in the config"},

	{"element with a limit", (*attacker).limited, "1 elements have a limit"},
	{"limit for each element", likeOurs("interval", "limit rate 1/hour;"), "set non-masq-v4 is missing"},
	{"quota for each element", likeOurs("interval", "quota 10 bytes;"), "set non-masq-v4 is missing"},
	{"connections of each element", since(6, 12, likeOurs("interval", "ct count 1;")), "set non-masq-v4 is missing"},
	{"counter for each element", likeOurs("interval", "counter;"), "set non-masq-v4 is missing"},
	{"timeout of the set", likeOurs("interval, timeout", "timeout 1h;"), "set non-masq-v4 is missing"},
	{"set with timeouts", likeOurs("interval, timeout", ""), "set non-masq-v4 is missing"},
	{"garbage collection of the set", likeOurs("interval, timeout", "gc-interval 1h;"), "set non-masq-v4 is missing"},
	{"constant set", since(6, 1, likeOurs("interval, constant", "")), "set non-masq-v4 is missing"},
	{"bounded set", likeOurs("interval", "size 5000;"), "set non-masq-v4 is missing"},
	{"policy of the set", likeOurs("interval", "policy memory;"), "set non-masq-v4 is missing"},
	{
		"map of the set's name", does("flush chain TABLE postrouting; delete set TABLE SET; add map TABLE SET { type " +
			"ipv4_addr : mark; flags interval; comment \"destinations that see the pod's own address\"; }"),
		"set non-masq-v4 is missing",
	},
	{"concatenation in the set", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type " +
		"ipv4_addr . inet_service; flags interval; }"), "set non-masq-v4 is missing"},
	{
		"plain set without intervals",
		does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type ipv4_addr; comment " +
			"\"destinations that see the pod's own address\"; }"), "set non-masq-v4 is missing",
	},
	{
		"set that rules fill", does("add set TABLE learned { type ipv4_addr; flags dynamic; }; add chain TABLE foreign { " +
			"type filter hook forward priority 0; }; add rule TABLE foreign update @learned { ip daddr limit rate 1/hour }"),
		"set learned is not in the config",
	},
	{"spare set that rules fill", (*attacker).fillSpare, "chain foreign is not in the config"},

	{
		"add rule", does("add rule TABLE postrouting ip daddr 198.51.100.8 return"),
		"unexpected rule: meta nfproto ipv4 ip daddr 198.51.100.8 return",
	},
	{"insert rule", does("insert rule TABLE postrouting accept"), "unexpected rule: accept"},
	{
		"add rule with a set of its own", does("add rule TABLE postrouting ip daddr { 198.51.100.8, 198.51.100.9 } return"),
		"unexpected rule",
	},
	{"add rule with a chain of its own", does("add rule TABLE postrouting jump { counter; }"), "unexpected rule"},
	{"add rule for our set", does("insert rule TABLE postrouting ip saddr @SET accept"), "unexpected rule"},
	{
		"double rule", func(a *attacker) { a.nft("add rule TABLE postrouting ip daddr @SET counter name exempt-v4 return") },
		"unexpected rule",
	},
	{"replace rule", func(a *attacker) {
		a.nft(fmt.Sprintf("replace rule TABLE postrouting handle %d accept",
			a.rule(1)))
	}, "unexpected rule: accept"},
	{
		"delete rule", func(a *attacker) { a.nft(fmt.Sprintf("delete rule TABLE postrouting handle %d", a.rule(-1))) },
		"missing rule",
	},
	{"move rule", func(a *attacker) {
		a.nft(fmt.Sprintf("delete rule TABLE postrouting handle %d; add rule TABLE postrouting ip daddr @SET counter name "+
			"exempt-v4 return", a.rule(1)))
	}, "in another order"},
	{"change comment", func(a *attacker) {
		a.nft(fmt.Sprintf(`replace rule TABLE postrouting handle %d meta nfproto ipv6 counter name masqueraded-v6 masquerade fully-random comment "config 00000000"`, a.rule(-1)))
	}, "missing rule"},
	{"change switch", func(a *attacker) {
		a.nft(fmt.Sprintf(`replace rule TABLE postrouting handle %d meta nfproto ipv4 counter name masqueraded-v4 masquerade`,
			a.rule(2)))
	}, "missing rule"},

	{
		"add set", does("add set TABLE foreign { type ipv4_addr; elements = { 1.1.1.1 }; }"),
		"set foreign is not in the config",
	},
	{"add the other side", does("add set TABLE non-masq-v4-a { type ipv4_addr; flags interval; }; add set TABLE " +
		"non-masq-v4-b { type ipv4_addr; flags interval; }"), "is not in the config"},
	{"use the other side", does("add set TABLE non-masq-v4-a { type ipv4_addr; flags interval; }; add set TABLE " +
		"non-masq-v4-b { type ipv4_addr; flags interval; }; insert rule TABLE postrouting ip daddr @non-masq-v4-a ip " +
		"daddr @non-masq-v4-b accept"), "is not in the config"},
	{"other kind of set", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type " +
		"ether_addr; }"), "is missing"},
	{"set with a timeout", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type " +
		"ipv4_addr; flags interval, timeout; }"), "is missing"},
	{"set without comment", does("flush chain TABLE postrouting; delete set TABLE SET; add set TABLE SET { type " +
		"ipv4_addr; flags interval; }"), "is missing"},
	{"add chain", does("add chain TABLE foreign"), "chain foreign is not in the config"},
	{
		"jump to a chain", does("add chain TABLE foreign { accept; }; insert rule TABLE postrouting jump foreign"),
		"chain foreign is not in the config",
	},
	{"chain that uses our set", does("add chain TABLE foreign { type filter hook forward priority 0; }; add rule TABLE " +
		"foreign ip daddr @SET drop"), "chain foreign is not in the config"},
	{
		"chain before ours", does("add chain TABLE before { type nat hook postrouting priority 0; accept; }"),
		"chain before is not in the config",
	},
	{
		"map of verdicts", does("add chain TABLE one { accept; }; add map TABLE verdicts { type ipv4_addr : verdict; " +
			"elements = { 198.51.100.8 : goto one }; }; insert rule TABLE postrouting ip daddr vmap @verdicts"),
		"set verdicts is not in the config",
	},
	{"chains in a ring of maps", does("add chain TABLE one; add map TABLE verdicts { type ipv4_addr : verdict; " +
		"elements = { 198.51.100.8 : jump one }; }; add rule TABLE one ip saddr 1.1.1.1 return; insert rule TABLE " +
		"postrouting ip daddr vmap @verdicts"), "chain one is not in the config"},
	{"add counter", does("add counter TABLE foreign"), "object foreign is not in the config"},
	{
		"add quota", does("add quota TABLE masqueraded-v4 { over 10 mbytes; }"),
		"object masqueraded-v4 is not in the config",
	},
	{"limit in a rule", does("add limit TABLE slow { rate 10/second; }; insert rule TABLE postrouting limit name slow " +
		"accept"), "object slow is not in the config"},
	{"delete counters", does("flush chain TABLE postrouting; delete counter TABLE local-v4; delete counter TABLE " +
		"masqueraded-v6"), "counters are missing: local-v4, masqueraded-v6"},
	{"flowtable", (*attacker).flowtable, "is not in the config"},

	{
		"map to our chain without a hook",
		does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting; add map TABLE " +
			"verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : goto postrouting }; }; add chain TABLE foreign " +
			"{ type filter hook forward priority 0; }; add rule TABLE foreign ip daddr vmap @verdicts"), "no hook",
	},
	{
		"unused map to our chain without a hook",
		does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting; add map TABLE " +
			"verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : goto postrouting }; }"), "no hook",
	},
	{"map of verdicts of the spare set's name", (*attacker).mapSpare, "is not in the config"},
	{"map of objects", does("add counter TABLE foreign; add map TABLE objects { type ipv4_addr : counter; elements = { " +
		"198.51.100.8 : \"foreign\" }; }; add chain TABLE foreign { type filter hook forward priority 0; }; add rule " +
		"TABLE foreign counter name ip daddr map @objects"), "set objects is not in the config"},
	{"map of our counters", does("add map TABLE objects { type ipv4_addr : counter; elements = { 198.51.100.8 : " +
		"\"masqueraded-v4\" }; }; add chain TABLE foreign { type filter hook forward priority 0; }; add rule TABLE " +
		"foreign counter name ip daddr map @objects"), "set objects is not in the config"},
	{
		"map of a quota of our counter's name",
		does("flush chain TABLE postrouting; delete counter TABLE masqueraded-v4; add quota TABLE masqueraded-v4 { over " +
			"10 mbytes; }; add map TABLE objects { type ipv4_addr : quota; elements = { 198.51.100.8 : \"masqueraded-v4\" }; }"),
		"object masqueraded-v4 is not in the config",
	},
	{
		"quota of our counter's name in use",
		does("flush chain TABLE postrouting; delete counter TABLE masqueraded-v4; add quota TABLE masqueraded-v4 { over " +
			"10 mbytes; }; add chain TABLE foreign { type filter hook forward priority 0; }; add rule TABLE foreign quota " +
			"name masqueraded-v4 drop"), "object masqueraded-v4 is not in the config",
	},
	{"ct helper", does("add ct helper TABLE ftp { type \"ftp\" protocol tcp; }; add chain TABLE foreign { type filter " +
		"hook prerouting priority 0; }; add rule TABLE foreign tcp dport 21 ct helper set \"ftp\""), "is not in the config"},
	{"ct timeout", does("add ct timeout TABLE short { protocol tcp; policy = { established: 10 }; }; add chain TABLE " +
		"foreign { type filter hook prerouting priority -300; }; add rule TABLE foreign meta l4proto tcp ct timeout set " +
		"\"short\""), "object short is not in the config"},
	{"ct expectation", does("add ct expectation TABLE data { protocol tcp; dport 9876; timeout 10s; size 2; l3proto " +
		"ip; }"), "object data is not in the config"},
	{"synproxy", does("add synproxy TABLE proxy { mss 1460; wscale 7; }"), "object proxy is not in the config"},
	{
		"chain on a device", does("add chain TABLE early { type filter hook ingress device lo priority 0; }"),
		"chain early is not in the config",
	},
	{"chain of every hook", does("add chain TABLE a { type filter hook prerouting priority 0; }; add chain TABLE b { " +
		"type route hook output priority 0; }; add chain TABLE c { type nat hook input priority 0; }; add chain TABLE d { " +
		"type nat hook output priority 0; }"), "chain a is not in the config"},
	{"dynamic set for our chain", does("add set TABLE learned { type ipv4_addr; flags dynamic; }; insert rule TABLE " +
		"postrouting update @learned { ip saddr }"), "set learned is not in the config"},
	{"dormant with a map", func(a *attacker) {
		a.nft("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting; add map TABLE " +
			"verdicts { type ipv4_addr : verdict; elements = { 198.51.100.8 : goto postrouting }; }")
		a.nft("add table TABLE { flags dormant; }")
	}, "is dormant"},
	{"orphaned table", since(6, 9, (*attacker).orphan), "has the flag owner or persist"},

	{"policy", does("add chain TABLE postrouting { policy drop; }"), "another policy than accept"},
	{"priority", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { " +
		"type nat hook postrouting priority 50; }"), "priority 50"},
	{"hook", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type " +
		"nat hook output priority 110; counter; }"), "not nat hook postrouting priority 110"},
	{"type", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type " +
		"filter hook postrouting priority 110; }"), "filter hook postrouting"},
	{"no hook", does("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { " +
		"accept; }; add chain TABLE foreign { type filter hook output priority 0; jump postrouting; }"), "no hook"},
	{"dormant", does("add table TABLE { flags dormant; }"), "is dormant"},
	{"dormant at another priority", func(a *attacker) {
		a.nft("flush chain TABLE postrouting; delete chain TABLE postrouting; add chain TABLE postrouting { type nat hook " +
			"postrouting priority 50; }")
		a.nft("add table TABLE { flags dormant; }")
	}, "is dormant"},
	{"dormant and another chain", does("add chain TABLE foreign { type filter hook output priority 0; }; add table " +
		"TABLE { flags dormant; }"), "is dormant"},
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

func TestTamperingWithOurTableIsReverted(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	for _, n := range []int{10, 1000}[:nfttest.Rounds(1, 2, 2)] {
		t.Run(fmt.Sprintf("%d CIDRs", n), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			loadForeign(t, ns)
			c := tamperConfig(n)
			want := nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true})
			k := open(t, ns)
			apply(t, k, want, layout.Ours)
			for i, tamper := range ownTamperings {
				if i%nfttest.Rounds(7, 1, 1) > 0 {
					continue
				}
				t.Run(tamper.name, func(t *testing.T) {
					a := &attacker{
						t: t, ns: ns, table: "inet " + nft.TableName, set: liveSet(t, ns),
						first: c.NonMasqueradeCIDRs[0].Prefix, want: want,
					}
					tamper.do(a)
					revert(t, ns, k, want, tamper.finds)
				})
			}
		})
	}
}

// A Frame is everything but the elements of sets.
func TestFrameLeavesOutOnlyTheElements(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	ns := nfttest.NewNS(t, "node")
	c := tamperConfig(10)
	c.SNATAddresses = cases.CIDRs("198.51.100.208/29")
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	want = want.On([]netip.Addr{netip.MustParseAddr("198.51.100.211"), netip.MustParseAddr("198.51.100.212")})
	k := open(t, ns)
	apply(t, k, want, layout.Ours)
	first := c.NonMasqueradeCIDRs[0].Prefix
	for _, tt := range []struct{ do, finds string }{
		{do: "flush chain TABLE postrouting", finds: "missing rule"},
		{do: "delete table TABLE", finds: "is missing"},
		{do: "flush ruleset", finds: "is missing"},
		{do: "add set TABLE theirs { type ipv4_addr; }", finds: "set theirs"},
		{do: "add element TABLE SET { 198.51.100.0/24 }"},
		{do: "flush set TABLE SET"},
		{do: "delete element TABLE SET { FIRST }; add element TABLE SET { 198.51.100.0/24 }"},
	} {
		if diffs := apply(t, k, want, layout.Ours); len(diffs) > 0 { // counts what was written
			t.Fatalf("before %q: %q", tt.do, diffs)
		}
		a := &attacker{t: t, ns: ns, table: "inet " + nft.TableName, set: liveSet(t, ns), first: first, want: want}
		a.nft(tt.do)
		seen := tt.finds != ""
		diffs := strings.Join(apply(t, k, want, layout.Frame), "\n")
		if seen != (diffs != "") || seen && !strings.Contains(diffs, tt.finds) {
			t.Errorf("after %q a Frame has %q, want %q: %t", tt.do, diffs, tt.finds, seen)
		}
		if !seen {
			apply(t, k, want, layout.Ours)
		}
		inSync(t, ns, want)
	}
	// What was right for another policy, or before an error, is not trusted.
	other := nft.Compile(tamperConfig(11), nft.Options{Layout: native.Layout{}})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := k.Apply(ended, other, layout.Ours); err == nil {
		t.Error("applied although the context has ended")
	}
	apply(t, k, other, layout.Frame)
	inSync(t, ns, other)
}

// liveSet returns the current name of the set of IPv4 destinations.
func liveSet(t *testing.T, ns *nfttest.NS) string {
	t.Helper()
	sets, err := connect(t, ns).Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(sets, func(s nfnetlink.Set) bool { return strings.HasPrefix(s.Name, "non-masq-v4") })
	return sets[i].Name
}

// revert checks that Diff reports a tampering, that Apply reverts it and nothing
// of other programs, and that there are no differences afterwards.
func revert(t *testing.T, ns *nfttest.NS, k *Kernel, want nft.Ruleset, finds string) {
	t.Helper()
	foreign, listing := foreignRules(t, ns), foreignListing(t, ns)
	diffs, err := k.Diff(t.Context(), want, layout.Ours)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(diffs, func(d string) bool { return strings.Contains(d, finds) }) {
		t.Errorf("Diff says %q, nothing with %q", diffs, finds)
	}
	a, err := k.Apply(t.Context(), want, layout.Ours)
	if err != nil {
		nfttest.NFT(t, ns, "flush ruleset", "-f", "-") // the next one starts from scratch
		t.Errorf("Apply: %v", err)
		return
	}
	if diff := cmp.Diff(diffs, a.Differences); diff != "" {
		t.Errorf("Apply undid (-found +undone):\n%s", diff)
	}
	inSync(t, ns, want)
	if diff := cmp.Diff(foreign, foreignRules(t, ns)); diff != "" {
		t.Errorf("foreign rules (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(listing, foreignListing(t, ns)); diff != "" {
		t.Errorf("foreign tables (-before +after):\n%s", diff)
	}
}

// sharedTamperings are for the chain in the tables that iptables lists.
var sharedTamperings = []tampering{
	{"flush ruleset", does("flush ruleset"), "has no chain POSTROUTING"},
	{"firewalld reload", does(firewalldReload), "has no chain POSTROUTING"},
	{"delete table", does("delete table ip nat"), "table ip nat has no chain POSTROUTING"},
	{"delete table of IPv6", does("delete table ip6 nat"), "table ip6 nat has no chain POSTROUTING"},
	{"iptables -F", runs("-F"), "has no jump to IP-MASQ-AGENT"},
	{"iptables -F -X", runs("-F", "-X"), "has no chain POSTROUTING"},
	{"iptables -F POSTROUTING", runs("-F POSTROUTING"), "has no jump to IP-MASQ-AGENT"},
	{"iptables -F of our chain", runs("-F IP-MASQ-AGENT"), "missing rule"},
	{"iptables -A", runs("-A IP-MASQ-AGENT -d 198.51.100.8 -j RETURN"), "unexpected rule"},
	{"iptables -I", runs("-I IP-MASQ-AGENT -j ACCEPT"), "unexpected rule"},
	{"iptables -D", runs("-D IP-MASQ-AGENT 3"), "missing rule"},
	{"iptables -R", runs("-R IP-MASQ-AGENT 3 -d 198.51.100.8 -j RETURN"), "missing rule"},
	{"iptables -D of the last", (*attacker).deleteLast, "missing rule"},
	{"iptables -D of the jump", (*attacker).deleteJump, "has no jump to IP-MASQ-AGENT"},
	{"iptables -A of a jump", runs("-A POSTROUTING -j IP-MASQ-AGENT"), "other jumps to IP-MASQ-AGENT"},
	{
		"iptables -N of a chain that we would use", runs("-N IP-MASQ-AGENT-SRC"),
		"chain IP-MASQ-AGENT-SRC is not in the config",
	},
	{
		"base chain of our name", does("flush chain ip nat POSTROUTING; flush chain ip nat IP-MASQ-AGENT; delete chain ip " +
			"nat IP-MASQ-AGENT; add chain ip nat IP-MASQ-AGENT { type nat hook postrouting priority 90; accept; }"),
		"chain IP-MASQ-AGENT has nat hook postrouting priority 90",
	},
	{
		"base chain of the name of a further chain",
		does("add chain ip nat IP-MASQ-AGENT-SRC { type nat hook output priority 90; }"),
		"IP-MASQ-AGENT-SRC has nat hook output",
	},
	{
		"map of verdicts to our chain",
		does("flush chain ip nat IP-MASQ-AGENT; add map ip nat verdicts { type ipv4_addr : verdict; elements = { " +
			"198.51.100.8 : jump IP-MASQ-AGENT }; }; add rule ip nat POSTROUTING ip daddr vmap @verdicts"), "missing rule",
	},
	{"native rule", does("insert rule ip nat IP-MASQ-AGENT accept"), "unexpected rule"},
	{
		"native set in a rule", does("insert rule ip nat IP-MASQ-AGENT ip daddr { 198.51.100.8, 198.51.100.9 } return"),
		"unexpected rule",
	},
	{"move rule", (*attacker).moveShared, "in another order"},
	{"dormant", does("add table ip nat { flags dormant; }"), "is dormant"},
}

func TestTableOfTheOtherModeIsRemoved(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	k, want := open(t, ns), xtOf(tamperConfig(10))
	apply(t, k, want, layout.Ours)
	nfttest.NFT(t, ns, "table inet nft-masq-agent { chain postrouting { type nat hook postrouting priority 110; "+
		"masquerade; }; }", "-f", "-")
	if diffs := apply(t, k, want, everything); !slices.Equal(diffs, []string{"leftover table inet nft-masq-agent"}) {
		t.Errorf("found %q", diffs)
	}
	inSync(t, ns, want)
}

// runs returns the attack that runs iptables once for each line.
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
	a.rewrite(a.want.Tables[0].Chain(xtables.Postrouting).Rules[0], "-D", xtables.Postrouting)
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

func TestTamperingWithTheSharedTablesIsReverted(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft")
	for _, n := range []int{10, 1000}[:nfttest.Rounds(1, 2, 2)] {
		t.Run(fmt.Sprintf("%d CIDRs", n), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			loadForeign(t, ns)
			want := xtOf(tamperConfig(n))
			k := open(t, ns)
			apply(t, k, want, layout.Ours)
			for i, tamper := range sharedTamperings {
				if i%nfttest.Rounds(7, 1, 1) > 0 {
					continue
				}
				t.Run(tamper.name, func(t *testing.T) {
					tamper.do(&attacker{t: t, ns: ns, table: "inet " + nft.TableName, want: want})
					revert(t, ns, k, want, tamper.finds)
				})
			}
		})
	}
}
