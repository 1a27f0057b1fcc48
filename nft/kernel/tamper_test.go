package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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

// An attacker changes our rules with the usual programs.
type attacker struct {
	t    testing.TB
	ns   *nfttest.NS
	want nft.Ruleset
}

// run does what the lines of a script say. Those of nft are one transaction up to "--". TABLE is
// our table, NAME-? the name that a set has now, NAME-! the one that the next update gives it, and
// CHAIN HANDLE2 its third rule. For iptables, JUMP is our jump, and RULE0 the first rule of our chain,
// RULE-1 the last. "since 6.12" is a script that kernels before that version reject: the first one of
// those tried that accepted it, or the one that introduced what it uses. Lines with "!" call an attack.
func (a *attacker) run(script string) {
	a.t.Helper()
	attacks := map[string]func(*attacker, string){
		"like-ours": (*attacker).likeOurs, "catch-all": (*attacker).catchAll, "limited": (*attacker).limited,
		"flowtable": (*attacker).flowtable, "orphan": (*attacker).orphan,
	}
	var transaction strings.Builder
	commit := func() {
		if transaction.Len() > 0 {
			nfttest.NFT(a.t, a.ns, transaction.String(), "-f", "-")
		}
		transaction.Reset()
	}
	for line := range strings.Lines(a.named(script)) {
		switch word, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " "); {
		case word == "since":
			major, minor, _ := strings.Cut(rest, ".")
			if nfttest.KernelBefore(a.t, atoi(a.t, major), atoi(a.t, minor)) {
				a.t.Skipf("kernels before %s reject it", rest)
			}
		case word == "--":
			commit()
		case word == "iptables":
			iptables(a.t, a.ns, nfnetlink.IPv4, shellWords(rest)...)
		case strings.HasPrefix(word, "!"):
			attacks[word[1:]](a, rest)
		default:
			transaction.WriteString(line)
		}
	}
	commit()
}

func atoi(t testing.TB, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// named fills in the names of what exists now.
func (a *attacker) named(text string) string {
	a.t.Helper()
	sides := func(name string) (live, spare string) {
		if slices.ContainsFunc(a.sets(), func(s nfnetlink.Set) bool { return s.Name == name+nft.SideB }) {
			return name + nft.SideB, name + nft.SideA
		}
		return name + nft.SideA, name + nft.SideB
	}
	for _, fill := range []struct {
		what string
		with func(name, n string) string
	}{
		{`([\w-]+)-(\?)`, func(name, _ string) string { live, _ := sides(name); return live }},
		{`([\w-]+)-(!)`, func(name, _ string) string { _, spare := sides(name); return spare }},
		{`(\S+) HANDLE(\d+)`, func(chain, n string) string {
			rules := rulesOf(a.t, connect(a.t, a.ns), nfnetlink.Inet, nft.TableName, chain)
			return fmt.Sprintf("%s handle %d", chain, rules[atoi(a.t, n)].Handle)
		}},
		{`(JUMP)()`, func(string, string) string { return a.want.Tables[0].Chain(xtables.Postrouting).Rules[0].String() }},
		{`(RULE)(0|-1)`, func(_, n string) string {
			rules := a.want.Tables[0].Chain(cases.DefaultChain).Rules
			return rules[max(0, atoi(a.t, n)*(1-len(rules)))].String()
		}},
	} {
		pattern := regexp.MustCompile(fill.what)
		text = pattern.ReplaceAllStringFunc(text, func(found string) string {
			m := pattern.FindStringSubmatch(found)
			return fill.with(m[1], m[2])
		})
	}
	return strings.ReplaceAll(text, "TABLE", "inet "+nft.TableName)
}

// sets returns the sets of our table; none if there is no table.
func (a *attacker) sets() []nfnetlink.Set {
	a.t.Helper()
	sets, err := connect(a.t, a.ns).Sets(nfnetlink.Inet, nft.TableName)
	if err != nil && !nfnetlink.IsNotExist(err) {
		a.t.Fatal(err)
	}
	return sets
}

// rulesOf returns the rules of a chain, or of all that a name left out can be.
func rulesOf(t testing.TB, c *nfnetlink.Conn, f nfnetlink.Family, table, chain string) []nfnetlink.Rule {
	t.Helper()
	rules, _, err := c.FirstRules(f, table, chain, func(nfnetlink.Rule) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

// catchAll adds the element that matches every other address. nft 1.0.6 cannot
// add it to a set of intervals.
func (a *attacker) catchAll(string) {
	a.t.Helper()
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	err := a.elements([]netlink.Attribute{elementFlags(catchAll)})
	switch {
	case errors.Is(err, unix.EINVAL):
		a.t.Logf("this kernel has no catch-all element (since Linux 5.13): %v", err)
		a.run("add element TABLE non-masq-v4-? { 8.8.8.0/24 }")
	case err != nil:
		a.t.Fatal(err)
	}
}

// limited adds a limit to one element of a set without a common limit, which nft
// 1.0.6 rejects and the kernel accepts.
func (a *attacker) limited(string) {
	a.t.Helper()
	first := a.want.Tables[0].Sets[0].Prefixes[0]
	a.run("delete element TABLE non-masq-v4-? { " + first.String() + " }")
	r := iprange.Of(first)
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
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(a.named("non-masq-v4-?")), 0)},
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

// likeOurs replaces the set by one that differs only in a part of its declaration.
func (a *attacker) likeOurs(part string) {
	a.t.Helper()
	var held []string
	for _, p := range a.want.Tables[0].Sets[0].Prefixes {
		held = append(held, p.String())
	}
	a.run(strings.NewReplacer("PART", part, "HELD", strings.Join(held, ", ")).Replace(`flush chain TABLE postrouting
delete set TABLE non-masq-v4-?
add set TABLE non-masq-v4-? { type ipv4_addr; comment "destinations that see the pod's own address"; PART }
add element TABLE non-masq-v4-? { HELD }
insert rule TABLE postrouting ip daddr @non-masq-v4-? counter name exempt-v4 return
`))
}

// flowtable adds a flowtable and a rule that fills it, if the kernel has
// flowtables, and an empty chain in any case.
func (a *attacker) flowtable(string) {
	a.run("add chain TABLE forward { type filter hook forward priority 0; }")
	const text = "add flowtable inet nft-masq-agent fast { hook ingress priority 0; devices = { lo }; }"
	if _, err := a.ns.Output(text, "nft", "-f", "-"); err != nil {
		a.t.Logf("no flowtables in this kernel: %v", err)
		return
	}
	a.run("add rule TABLE forward meta l4proto tcp flow add @fast")
}

// orphan assigns our table to a process that exited: it has no owner, and its flag
// cannot be changed.
func (a *attacker) orphan(string) {
	a.t.Helper()
	a.run("delete table TABLE")
	owner := own(a.t, a.ns, nfnetlink.Inet, nft.TableName, flagOwner|flagPersist)
	if err := owner.Close(); err != nil {
		a.t.Fatal(err)
	}
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

// The files of testdata/tamperings have one paragraph for each: its name, the script of an [attacker],
// and a part of what has to be found.
func TestEachTamperingIsFoundAndReverted(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	many := tamperConfig(nfttest.Rounds(10, 10, 1000))
	for file, want := range map[string]nft.Ruleset{
		"native":       nft.Compile(many, nft.Options{Layout: native.Layout{}, RandomFully: true}),
		"xtables":      xtOf(many),
		"enforce":      nft.Compile(enforcing(), enforcingOptions()),
		"drop-invalid": nft.Compile(droppingInvalid(), enforcingOptions()),
		"snat": ruled([]config.SNATRule{
			{From: cases.CIDRs("10.244.8.0/24"), Addresses: cases.CIDRs("198.51.100.211/32")},
			{
				From:      cases.CIDRs("10.244.0.0/16", "fd00:8::/64"),
				Addresses: cases.CIDRs("198.51.100.212/32", "2001:db8:5::2/128"),
			},
			{To: cases.CIDRs("203.0.113.0/24"), Addresses: cases.CIDRs("198.51.100.211/32")},
		}, "198.51.100.211", "198.51.100.212", "2001:db8:5::2"),
	} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			loadForeign(t, ns)
			k := open(t, ns)
			apply(t, k, want, layout.Ours)
			text, err := os.ReadFile(filepath.Join("testdata", "tamperings", file+".txt"))
			if err != nil {
				t.Fatal(err)
			}
			for i, paragraph := range strings.Split(string(text), "\n\n") {
				if i%nfttest.Rounds(12, 1, 1) > 0 {
					continue
				}
				name, rest, _ := strings.Cut(strings.TrimPrefix(paragraph, "# "), "\n")
				script, finds, _ := strings.Cut(rest, "> ")
				t.Run(name, func(t *testing.T) {
					a := &attacker{t, ns, want}
					finds = a.named(strings.TrimRight(finds, "\n"))
					a.run(script)
					revert(t, ns, k, want, finds)
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
	for _, tt := range []struct{ do, finds string }{
		{do: "flush chain TABLE postrouting", finds: "missing rule"},
		{do: "delete table TABLE", finds: "is missing"},
		{do: "flush ruleset", finds: "is missing"},
		{do: "add set TABLE theirs { type ipv4_addr; }", finds: "set theirs"},
		{do: "add element TABLE non-masq-v4-? { 198.51.100.0/24 }"},
		{do: "flush set TABLE non-masq-v4-?"},
		{do: "delete element TABLE non-masq-v4-? { 10.0.0.0/24 }; add element TABLE non-masq-v4-? { 198.51.100.0/24 }"},
	} {
		if diffs := apply(t, k, want, layout.Ours); len(diffs) > 0 { // counts what was written
			t.Fatalf("before %q: %q", tt.do, diffs)
		}
		(&attacker{t, ns, want}).run(tt.do)
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

// revert checks that Diff reports a tampering, that Apply reverts it and nothing
// of other programs, and that there are no differences afterwards.
func revert(t *testing.T, ns *nfttest.NS, k *Kernel, want nft.Ruleset, finds string) {
	t.Helper()
	foreign := notOurs(t, ns, cases.DefaultChain)
	diffs, err := k.Diff(t.Context(), want, layout.Ours)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(diffs, func(d string) bool { return strings.Contains(d, finds) }) {
		t.Errorf("Diff finds nothing with %q, but:%s", finds, nfttest.Few(diffs))
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
	if diff := cmp.Diff(foreign, notOurs(t, ns, cases.DefaultChain)); diff != "" {
		t.Errorf("foreign rules (-before +after):\n%s", diff)
	}
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
