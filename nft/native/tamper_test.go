package native_test

import (
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
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/rule"
)

// An attacker changes our rules with nft.
type attacker struct {
	t testing.TB
	*modes.Node
	want nft.Ruleset
}

// run does what the lines of a script say. Those of nft are one transaction up to "--". TABLE is
// our table, NAME-? the name that a set has now, NAME-! the one that the next update gives it, and
// CHAIN HANDLE2 its third rule. "since 6.12" is a script that kernels before that version reject: the
// first one of those tried that accepted it, or the one that introduced what it uses. Lines with "!"
// call an attack.
func (a *attacker) run(script string) {
	a.t.Helper()
	attacks := map[string]func(...string){
		"like-ours": a.likeOurs, "catch-all": a.catchAll, "limited": a.limited, "flowtable": a.flowtable,
		"orphan": a.orphan, "many": a.many,
	}
	var transaction strings.Builder
	for line := range strings.Lines(a.named(script) + "--") {
		switch words := strings.Fields(line); {
		case words[0] == "since":
			major, minor, _ := strings.Cut(words[1], ".")
			if nfttest.KernelBefore(a.t, atoi(a.t, major), atoi(a.t, minor)) {
				a.t.Skipf("kernels before %s reject it", words[1])
			}
		case words[0] == "--":
			a.Load(a.t, transaction.String())
			transaction.Reset()
		case strings.HasPrefix(words[0], "!"):
			attacks[words[0][1:]](words[1:]...)
		default:
			transaction.WriteString(line)
		}
	}
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
	replace := func(pattern string, with func(name, n string) string) {
		p := regexp.MustCompile(pattern)
		text = p.ReplaceAllStringFunc(text, func(found string) string {
			m := p.FindStringSubmatch(found)
			return with(m[1], m[2])
		})
	}
	replace(`([\w-]+)-([?!])`, func(name, which string) string {
		sets, err := a.Conn.Sets(nfnetlink.Inet, nft.TableName)
		if err != nil && !nfnetlink.IsNotExist(err) {
			a.t.Fatal(err)
		}
		second := slices.ContainsFunc(sets, func(s nfnetlink.Set) bool { return s.Name == name+nft.SideB })
		if second == (which == "?") {
			return name + nft.SideB
		}
		return name + nft.SideA
	})
	replace(`(\S+) HANDLE(\d+)`, func(chain, n string) string {
		rules, _, err := a.Conn.FirstRules(nfnetlink.Inet, nft.TableName, chain, func(nfnetlink.Rule) bool { return false })
		if err != nil {
			a.t.Fatal(err)
		}
		return fmt.Sprintf("%s handle %d", chain, rules[atoi(a.t, n)].Handle)
	})
	return strings.ReplaceAll(text, "TABLE", "inet "+nft.TableName)
}

// catchAll adds the element that matches every other address. nft 1.0.6 cannot add it to a set of
// intervals.
func (a *attacker) catchAll(words ...string) {
	a.t.Helper()
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	if err := a.elements(words[0], []netlink.Attribute{elementFlags(catchAll)}); err != nil {
		a.t.Fatal(err)
	}
}

// limited adds a limit to one element of a set, or of a map, without a common limit, which nft 1.0.6
// rejects and the kernel accepts: it matches only now and then.
func (a *attacker) limited(words ...string) {
	a.t.Helper()
	a.run(fmt.Sprintf("delete element TABLE %s { %s }\n", words[0], words[1]))
	limit := nest(unix.NFTA_SET_ELEM_EXPR,
		netlink.Attribute{Type: unix.NFTA_EXPR_NAME, Data: []byte("limit\x00")},
		nest(unix.NFTA_EXPR_DATA,
			netlink.Attribute{Type: unix.NFTA_LIMIT_RATE, Data: binary.BigEndian.AppendUint64(nil, 1)},
			netlink.Attribute{Type: unix.NFTA_LIMIT_UNIT, Data: binary.BigEndian.AppendUint64(nil, 3600)}))
	address := func(typ uint16, addr netip.Addr) netlink.Attribute {
		return nest(typ, netlink.Attribute{Type: unix.NFTA_DATA_VALUE, Data: addr.AsSlice()})
	}
	key, value, mapped := strings.Cut(words[1], ":")
	var elements [][]netlink.Attribute
	if mapped {
		elements = append(elements, []netlink.Attribute{
			address(unix.NFTA_SET_ELEM_KEY, netip.MustParseAddr(key)),
			address(unix.NFTA_SET_ELEM_DATA, netip.MustParseAddr(value)), limit,
		})
	} else {
		r := iprange.Of(netip.MustParsePrefix(key))
		elements = append(elements, []netlink.Attribute{address(unix.NFTA_SET_ELEM_KEY, r.From), limit},
			[]netlink.Attribute{address(unix.NFTA_SET_ELEM_KEY, r.To.Next()), elementFlags(unix.NFT_SET_ELEM_INTERVAL_END)})
	}
	if err := a.elements(words[0], elements...); err != nil {
		a.t.Fatal(err)
	}
}

// many does as often as its first word says what the others say, with two bytes of the count as numbers.
func (a *attacker) many(words ...string) {
	a.t.Helper()
	var script strings.Builder
	for i := range atoi(a.t, words[0]) {
		fmt.Fprintf(&script, strings.Join(words[1:], " ")+"\n", i>>8, i&255)
	}
	a.Load(a.t, script.String())
}

func elementFlags(flags uint32) netlink.Attribute {
	return netlink.Attribute{Type: unix.NFTA_SET_ELEM_FLAGS, Data: binary.BigEndian.AppendUint32(nil, flags)}
}

func nest(typ uint16, inner ...netlink.Attribute) netlink.Attribute {
	data, _ := netlink.MarshalAttributes(inner)
	return netlink.Attribute{Type: typ | unix.NLA_F_NESTED, Data: data}
}

// elements adds elements with any attributes to a set.
func (a *attacker) elements(set string, elements ...[]netlink.Attribute) error {
	a.t.Helper()
	var listed []netlink.Attribute
	for _, e := range elements {
		listed = append(listed, nest(unix.NFTA_LIST_ELEM, e...))
	}
	list, _ := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_SET_ELEM_LIST_TABLE, Data: append([]byte(nft.TableName), 0)},
		{Type: unix.NFTA_SET_ELEM_LIST_SET, Data: append([]byte(set), 0)},
		nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, listed...),
	})
	message := func(typ netlink.HeaderType, flags netlink.HeaderFlags, head, body []byte) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: typ, Flags: netlink.Request | flags}, Data: append(head, body...)}
	}
	nl, err := nfttest.DialNetfilter(a.NS)
	if err != nil {
		return err
	}
	defer nl.Close()
	_, err = nl.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}, nil),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM, netlink.Create|netlink.Acknowledge,
			[]byte{unix.NFPROTO_INET, 0, 0, 0}, list),
		message(unix.NFNL_MSG_BATCH_END, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}, nil),
	})
	if err == nil {
		_, err = nl.Receive()
	}
	return err
}

// likeOurs replaces the set by one that differs only in a part of its declaration.
func (a *attacker) likeOurs(words ...string) {
	a.t.Helper()
	held := strings.Trim(fmt.Sprint(a.want.Tables[0].Sets[0].Prefixes), "[]")
	a.run(strings.NewReplacer("PART", strings.Join(words, " "), "HELD", strings.ReplaceAll(held, " ", ", ")).Replace(
		`flush chain TABLE postrouting
delete set TABLE non-masq-v4-?
add set TABLE non-masq-v4-? { type ipv4_addr; comment "destinations that see the pod's own address"; PART }
add element TABLE non-masq-v4-? { HELD }
insert rule TABLE postrouting ip daddr @non-masq-v4-? counter name exempt-v4 return
`))
}

// flowtable adds a flowtable and a rule that fills it, if the kernel has flowtables, and an empty
// chain in any case.
func (a *attacker) flowtable(...string) {
	a.run("add chain TABLE forward { type filter hook forward priority 0; }\n")
	const text = "add flowtable inet nft-masq-agent fast { hook ingress priority 0; devices = { lo }; }"
	if _, err := a.Output(text, "nft", "-f", "-"); err != nil {
		a.t.Logf("no flowtables in this kernel: %v", err)
		return
	}
	a.run("add rule TABLE forward meta l4proto tcp flow add @fast\n")
}

// orphan assigns our table to a process that exited: it has no owner, and its flag cannot be
// changed.
func (a *attacker) orphan(...string) {
	a.t.Helper()
	a.run("delete table TABLE\n")
	const owner, persist = 1 << 1, 1 << 2 // NFT_TABLE_F_OWNER, NFT_TABLE_F_PERSIST
	if err := nfttest.Own(a.t, a.NS, byte(nfnetlink.Inet), nft.TableName, owner|persist).Close(); err != nil {
		a.t.Fatal(err)
	}
}

// tampered are rulesets by the file of testdata/tamperings that has attacks on them.
func tampered() map[string]nft.Ruleset {
	o := nft.Options{Layout: native.Layout{}, RandomFully: true, Marks: cases.Marks()}
	plain := config.Config{MasqLinkLocal: true, EnableIPv6: true, NonMasqueradeCIDRs: cases.CIDRs("fd00::/8")}
	for i := range 10 {
		plain.NonMasqueradeCIDRs = append(plain.NonMasqueradeCIDRs, cases.CIDRs(fmt.Sprintf("10.0.%d.0/24", 2*i))...)
	}
	pods := config.Config{
		EnableIPv6: true, NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "fd00::/8"),
		MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16", "fd00:10:244::/48"),
	}
	enforced, drops, snat := pods, pods, config.Default(config.Defaults{EnableIPv6: true})
	enforced.Enforce, drops.DropInvalid = &config.Position{}, &config.Position{}
	snat.SNATAddresses = cases.CIDRs("198.51.100.208/29", "2001:db8:5::/64")
	snat.SNATRules = []config.SNATRule{
		{From: cases.CIDRs("10.244.8.0/24"), Addresses: cases.CIDRs("198.51.100.211/32")},
		{
			From:      cases.CIDRs("10.244.0.0/16", "fd00:8::/64"),
			Addresses: cases.CIDRs("198.51.100.212/32", "2001:db8:5::2/128"),
		},
		{To: cases.CIDRs("203.0.113.0/24"), Addresses: cases.CIDRs("198.51.100.211/32")},
	}
	return map[string]nft.Ruleset{
		"differences": small(), "native": nft.Compile(plain, o), "enforce": nft.Compile(enforced, o),
		"drop-invalid": nft.Compile(drops, o),
		"snat":         nft.Compile(snat, o).On(cases.Addrs("198.51.100.211", "198.51.100.212", "2001:db8:5::2")),
	}
}

// The files of testdata/tamperings have one paragraph for each: its name, the script of an attacker,
// and a part of what has to be found ("> "), or all differences ("= "; "…" stands for any others, or for any rest
// of one). If it cannot be written over, the table is replaced.
func TestEachTamperingIsFoundAndReverted(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for file, want := range tampered() {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			n := modes.New(t, native.Read)
			n.Apply(t, want, layout.Ours)
			before := listing(t, n)
			text, err := os.ReadFile(filepath.Join("testdata", "tamperings", file+".txt"))
			if err != nil {
				t.Fatal(err)
			}
			for paragraph := range strings.SplitSeq(string(text), "\n\n") {
				name, rest, _ := strings.Cut(strings.TrimPrefix(paragraph, "# "), "\n")
				script, finds, exactly := strings.Cut(rest, "\n= ")
				if !exactly {
					script, finds, _ = strings.Cut(rest, "\n> ")
				}
				t.Run(name, func(t *testing.T) {
					a := &attacker{t, n, want}
					finds = a.named(strings.TrimRight(finds, "\n"))
					a.run(script + "\n")
					s := n.Read(t, want, layout.Ours)
					found := modes.Texts(s, rule.String)
					ok := slices.ContainsFunc(found, func(d string) bool { return strings.Contains(d, finds) })
					if exactly {
						ok = finds == "nothing" && len(found) == 0 || modes.Match(found, strings.Split(finds, "\n= "))
					}
					if !ok {
						t.Errorf("want %q, found is:%s", finds, nfttest.Few(found))
					}
					if i, ok := s.Installed(); ok && i.Hash != want.Hash() && i.Hash != "" && name != "change comment" {
						t.Errorf("installed is %+v", i)
					}
					odd := slices.ContainsFunc(found, func(d string) bool { return strings.HasPrefix(d, "odd: ") })
					if odd || !exactly { // what is listed in full can be written over
						revert(t, n, s, odd)
					}
					n.Apply(t, want, layout.Ours)
					if diff := cmp.Diff(before, listing(t, n)); diff != "" {
						t.Errorf("listing (-before +after):\n%s", diff)
					}
				})
			}
		})
	}
}

// revert replaces the table if it has something odd, or if the kernel rejects to write it.
func revert(t *testing.T, n *modes.Node, s layout.State, odd bool) {
	t.Helper()
	commit, now, after := n.Commit(t), &nfnetlink.Batch{}, &nfnetlink.Batch{}
	err := s.Stage(t.Context(), commit)
	s.Switch(now, after)
	if odd || errors.Join(err, commit(now), commit(after)) != nil {
		if err := s.(layout.Replacer).Replace(commit); err != nil {
			t.Fatal(err)
		}
	}
}
