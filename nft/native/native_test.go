package native_test

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
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/xtables"
)

func TestMain(m *testing.M) {
	os.Exit(nfttest.Main(m))
}

// listing returns what nft lists of a node, with the names that a fresh table has.
func listing(t testing.TB, n *modes.Node) string {
	t.Helper()
	return asFresh(nfttest.ListRuleset(t, n.NS))
}

func asFresh(text string) string {
	for _, name := range regexp.MustCompile(`(?m)^\t(?:set|map) (\S+)-b {`).FindAllStringSubmatch(text, -1) {
		text = strings.ReplaceAll(text, name[1]+"-b", name[1]+"-a")
	}
	text = regexp.MustCompile(`(?m)^\t\telements = \{ 10.244.1.2 \. .*\n`).ReplaceAllString(text, "") // that rules added
	// A change adds sets and counters after those that were there before. A base chain that is
	// not needed stays empty.
	_, text, _ = strings.Cut(strings.TrimSuffix(text, "\n}\n"), "\n")
	blocks := slices.DeleteFunc(strings.Split(text, "\n\n"), func(block string) bool {
		return strings.Contains(block, "type ") && strings.HasSuffix(block, "policy accept;\n\t}")
	})
	slices.Sort(blocks)
	return strings.Join(blocks, "\n\n")
}

// Whatever the table had before, it has each case then, as nft writes it: the same text, and
// no byte of a rule differs. What nft lists of it can be loaded again.
func TestEachCaseIsWrittenOverTheOneBefore(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	var all []cases.Case
	cases.EachIn(t, nft.ModeNFTables, func(_ *testing.T, c cases.Case) { all = append(all, c) })
	n, theirs := modes.New(t, native.Read), modes.New(t, native.Read)
	for _, c := range all {
		want := c.Compile(nft.ModeNFTables)
		if diff := cmp.Diff(c.File(t, "ruleset.nft"), want.String()); diff != "" {
			t.Errorf("%s: text (-want +got):\n%s", c.Name, diff)
		}
		theirs.Load(t, "flush ruleset\n"+want.String())
		s := theirs.Read(t, want, nft.Contents)
		if diffs := modes.Texts(s); len(diffs) > 0 {
			t.Errorf("%s: of what nft wrote differs %q", c.Name, diffs)
		}
		installed, ok := s.Installed()
		if installed != (nft.Installed{Layout: native.Layout{}, Hash: want.Hash()}) || !ok {
			t.Errorf("%s: installed is %+v, %t", c.Name, installed, ok)
		}
		if found := n.Apply(t, want, nft.Contents); len(found) == 0 {
			t.Errorf("%s: there were no differences", c.Name)
		}
		listed := nfttest.ListRuleset(t, n.NS)
		if diff := cmp.Diff(listing(t, theirs), asFresh(listed)); diff != "" {
			t.Errorf("%s: listing (-nft +ours):\n%s", c.Name, diff)
		}
		theirs.Load(t, "flush ruleset\n"+listed)
		if diff := cmp.Diff(asFresh(listed), listing(t, theirs)); diff != "" {
			t.Errorf("%s: listing (-ours +loaded again):\n%s", c.Name, diff)
		}
		if diffs := modes.Texts(theirs.Read(t, want, nft.Contents)); len(diffs) > 0 {
			t.Errorf("%s: of what was loaded again differs %q", c.Name, diffs)
		}
	}
}

// Whatever a config combines, each chain, set and counter is used by a rule, and each that a rule uses is there.
func TestWhatIsCompiledIsUsed(t *testing.T) {
	t.Parallel()
	pods := cases.CIDRs("10.244.0.0/16", "fd00:10:244::/48")
	rule := config.SNATRule{From: pods[:1], Addresses: cases.CIDRs("198.51.100.9/32")}
	kinds := []struct{ declared, used *regexp.Regexp }{
		{regexp.MustCompile(`(?m)^\tchain (\S+) \{\n(?:\t\t[^t]|\t\})`), regexp.MustCompile(`(?:goto|jump) ([\w-]+)`)},
		{regexp.MustCompile(`(?m)^\t(?:map|set) (\S+) \{\n`), regexp.MustCompile(`@([\w-]+)`)},
		{regexp.MustCompile(`(?m)^\tcounter (\S+) \{\n`), regexp.MustCompile(`counter name ([\w-]+)`)},
	}
	for bits := range 1 << 7 {
		on := func(bit int) bool { return bits>>bit&1 == 1 }
		c := config.Config{EnableIPv6: true, ExemptHost: on(0), Enforce: on(1), DropInvalid: on(2), MasqueradeSrcCIDRs: pods}
		o := nft.Options{Layout: native.Layout{}}
		if on(3) {
			o.Ports = []nft.PortRange{{Min: 1024, Max: 2047}, {Min: 4096, Max: 8191}}
		}
		if on(4) {
			c.PortsPerPod = 2000
		} else if on(5) {
			c.SNATRules = []config.SNATRule{rule}
		}
		addresses := cases.Addrs("198.51.100.9")
		if on(6) {
			c.SNATAddresses = cases.CIDRs("198.51.100.8/31", "2001:db8:5::/64")
			addresses = cases.Addrs("198.51.100.8", "198.51.100.9", "2001:db8:5::2")
		}
		if on(6) && on(5) {
			addresses = addresses[:2]
		}
		text := nft.Compile(c, o).WithAddresses(addresses).String()
		for _, kind := range kinds {
			declared := names(text, kind.declared)
			declared = slices.DeleteFunc(declared, func(name string) bool { // which show the config
				return name == "snat-v4-a" || name == "snat-v6-a"
			})
			if diff := cmp.Diff(declared, names(text, kind.used)); diff != "" {
				t.Errorf("%07b: (-declared +used):\n%s", bits, diff)
			}
		}
	}
}

// names returns what an expression finds in a text, in order, each once.
func names(text string, expression *regexp.Regexp) (found []string) {
	for _, match := range expression.FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// small has sets of both families, a map of several addresses, sets of snatRules and a set
// that rules fill.
func small() nft.Ruleset {
	c := config.Config{EnableIPv6: true, MasqLinkLocal: true, MasqLinkLocalIPv6: true, Enforce: true}
	c.NonMasqueradeCIDRs = cases.CIDRs("10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24", "fd00::/8")
	c.MasqueradeSrcCIDRs = cases.CIDRs("10.244.0.0/16")
	c.SNATAddresses = cases.CIDRs("198.51.100.8/31")
	c.SNATRules = []config.SNATRule{
		{From: cases.CIDRs("10.244.8.0/24"), Addresses: cases.CIDRs("198.51.100.20/32")},
		{From: cases.CIDRs("10.244.10.0/24"), Addresses: cases.CIDRs("198.51.100.21/32")},
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}).
		WithAddresses(cases.Addrs("198.51.100.8", "198.51.100.9", "198.51.100.20", "198.51.100.21"))
}

// A filling of large sets is done in a few transactions, smaller ones for a small send buffer.
func TestSetsAreFilledInAFewTransactions(t *testing.T) {
	t.Parallel()
	c := config.Config{MasqLinkLocal: true}
	for i := range 20_000 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 0}), 25)
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
		if i < 1_000 {
			c.ForceMasqueradeCIDRs = append(c.ForceMasqueradeCIDRs, config.CIDR{Prefix: p})
		}
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	n := modes.New(t, native.Read)
	n.Apply(t, nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}}), nft.Contents)
	var sizes []int
	broken := errors.New("broken")
	stage := func(at int, err error) error {
		sizes = nil
		commit := n.Conn.Commit
		return n.Read(t, want, nft.Contents).Stage(t.Context(), func(b *nfnetlink.Batch) error {
			if len(sizes) == at && err != nil {
				defer func() { err = nil }()
				return err
			}
			if b.Elements > 0 {
				sizes = append(sizes, b.Elements)
			}
			return commit(b)
		})
	}
	if err := stage(2, broken); !errors.Is(err, broken) || !slices.Equal(sizes, []int{1_000, 10_500}) {
		t.Errorf("sent %v: %v", sizes, err)
	}
	if err := stage(0, nil); err != nil || !slices.Equal(sizes, []int{1_000, 10_500, 9_500}) {
		t.Errorf("sent %v: %v", sizes, err)
	}
	n.Apply(t, want, nft.Contents)
	for _, at := range []int{0, 1} {
		n.Load(t, "flush ruleset")
		if err := stage(at, unix.EMSGSIZE); err != nil || len(sizes) != 6+at || slices.Max(sizes) != 4_000 {
			t.Errorf("sent %v: %v", sizes, err)
		}
		n.Apply(t, want, nft.Contents)
	}
	want = small()
	if err := stage(0, nil); err != nil || len(sizes) != 1 {
		t.Errorf("small sets are sent as %v: %v", sizes, err)
	}

	n.Load(t, "flush ruleset")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Read(t, want, nft.Contents).Stage(ctx, n.Conn.Commit); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if left := nfttest.ListRuleset(t, n.NS); left != "" {
		t.Errorf("it wrote\n%s", left)
	}
}

// If another mode is wanted, our table goes a transaction later.
func TestTableThatIsNotWantedIsDeleted(t *testing.T) {
	t.Parallel()
	other := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: xtables.Layout{ChainName: "IP-MASQ"}})
	for _, tt := range []struct {
		want       nft.Ruleset
		now, after int
	}{
		{nft.Ruleset{}, 1, 0},
		{nft.Ruleset{Layout: native.Layout{}}, 1, 0},
		{other, 0, 1},
	} {
		n := modes.New(t, native.Read)
		check := func(found []string, inNow, inAfter int) {
			t.Helper()
			s, now, after := n.Read(t, tt.want, nft.WithLeftovers), &nfnetlink.Batch{}, &nfnetlink.Batch{}
			if err := s.Stage(t.Context(), func(*nfnetlink.Batch) error { return errors.New("it writes") }); err != nil {
				t.Error(err)
			}
			s.Switch(now, after)
			if got := modes.Texts(s); !slices.Equal(got, found) || now.Len() != inNow || after.Len() != inAfter {
				t.Errorf("mode %q: %q, %d and %d messages", tt.want.Mode(), got, now.Len(), after.Len())
			}
			for _, b := range []*nfnetlink.Batch{now, after} {
				if err := n.Conn.Commit(b); err != nil {
					t.Error(err)
				}
			}
		}
		check(nil, 0, 0)
		if _, ok := n.Read(t, tt.want, nft.Contents).Installed(); ok {
			t.Error("installed without a table")
		}
		n.Apply(t, small(), nft.Contents)
		if _, ok := n.Read(t, tt.want, nft.Contents).Installed(); !ok {
			t.Error("not installed")
		}
		n.Load(t, "flush chain inet nft-masq-agent postrouting")
		if found, ok := n.Read(t, tt.want, nft.Contents).Installed(); ok {
			t.Errorf("without rules, %+v is installed", found)
		}
		check([]string{"leftover: table inet nft-masq-agent"}, tt.now*deletion, tt.after*deletion)
		check(nil, 0, 0)
	}
}

// What another program adds to a chain between the two phases does not stay, also if there was no such chain before.
func TestChainsAreWrittenAsAWhole(t *testing.T) {
	t.Parallel()
	n := modes.New(t, native.Read)
	s, now, after := n.Read(t, small(), nft.Contents), &nfnetlink.Batch{}, &nfnetlink.Batch{}
	nfttest.NoError(t, s.Stage(t.Context(), n.Conn.Commit))
	n.Load(t, "add rule inet nft-masq-agent snat-v4 accept")
	s.Switch(now, after)
	nfttest.NoError(t, errors.Join(n.Conn.Commit(now), n.Conn.Commit(after)))
	if left := modes.Texts(n.Read(t, small(), nft.Contents)); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// deletion is the number of messages that delete a table.
const deletion = 1

// A map that old rules refer to goes a transaction later than they do, and with it all that has
// to go: chains keep their rules until then. Without such a map, everything goes at once.
func TestMapsAndChainsOutliveTheRulesThatReferToThem(t *testing.T) {
	t.Parallel()
	plain := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}})
	ports := nft.Compile(config.Default(config.Defaults{}), nft.Options{
		Layout: native.Layout{}, Ports: []nft.PortRange{{Min: 1024, Max: 2047}},
	})
	for _, tt := range []struct {
		name       string
		before     nft.Ruleset
		keeps      []string // lines of the listing that stay until the second transaction
		afterwards bool     // there is one
	}{
		{"a map", small(), []string{
			"map snat-by-pod-v4-a {", "map unused {", "set non-masq-v4-a {", "chain snat-rule-1-v4 {", "chain snat-v4 {",
			"snat ip to ip saddr & 0.0.0.255 map @snat-by-pod-v4-a fully-random",
		}, true},
		{"chains and sets", ports, nil, false},
		{"a base chain", ports, []string{"chain postrouting-before {", "goto to-ports comment"}, true},
	} {
		n := modes.New(t, native.Read)
		n.Apply(t, tt.before, nft.Contents)
		n.Load(t, "add map inet nft-masq-agent unused { type ipv4_addr : ipv4_addr; }")
		if tt.name == "a base chain" {
			n.Load(t, "rename chain inet nft-masq-agent postrouting postrouting-before")
		}
		s, now, after := n.Read(t, plain, nft.Contents), &nfnetlink.Batch{}, &nfnetlink.Batch{}
		commit := n.Conn.Commit
		nfttest.NoError(t, s.Stage(t.Context(), commit))
		s.Switch(now, after)
		if err := commit(now); err != nil || (after.Len() > 0) != tt.afterwards {
			t.Fatalf("%s: %v; %d messages afterwards", tt.name, err, after.Len())
		}
		text := nfttest.ListRuleset(t, n.NS)
		for _, line := range tt.keeps {
			if !strings.Contains(text, line) {
				t.Errorf("%s: after the rules, %q is not in\n%s", tt.name, line, text)
			}
		}
		n.Load(t, "add table inet neighbor") // commits in between
		nfttest.NoError(t, commit(after))
		n.Load(t, "delete table inet neighbor")
		expected := modes.New(t, native.Read)
		expected.Apply(t, plain, nft.Contents)
		if diff := cmp.Diff(listing(t, expected), listing(t, n)); diff != "" {
			t.Errorf("%s: left (-want +got):\n%s", tt.name, diff)
		}
	}
}

// A base chain that is not needed stays, empty: the kernel drops the packets in the queues of
// other programs when one is deleted. With rules, or a policy that drops, it differs.
func TestBaseChainsStayEmpty(t *testing.T) {
	t.Parallel()
	n := modes.New(t, native.Read)
	c := config.Config{MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"), Enforce: true, DropInvalid: true}
	both := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	n.Apply(t, both, nft.Contents)
	handles := func() []string {
		text := nfttest.NFT(t, n.NS, "", "-a", "list", "ruleset")
		return regexp.MustCompile(`chain (enforce|untranslated) \{ # handle \d+`).FindAllString(text, -1)
	}
	before := handles()
	plain := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}})
	n.Apply(t, plain, nft.Contents)
	for _, chain := range []string{"enforce", "untranslated"} {
		want := []string{"chain " + chain + " is not in the config"}
		for _, does := range []string{"rule TABLE CHAIN accept", "chain TABLE CHAIN { policy drop; }"} {
			n.Load(t, "add "+strings.NewReplacer("TABLE", "inet nft-masq-agent", "CHAIN", chain).Replace(does))
			if found := n.Apply(t, plain, nft.Contents); !slices.Equal(found, want) {
				t.Errorf("%s in %s: found %q", does, chain, found)
			}
		}
	}
	n.Apply(t, both, nft.Contents)
	if after := handles(); len(before) != 2 || !slices.Equal(after, before) {
		t.Errorf("before they were %q, now %q", before, after)
	}
	n.Apply(t, nft.Ruleset{}, nft.WithLeftovers)
	if left := nfttest.ListRuleset(t, n.NS); left != "" {
		t.Errorf("left\n%s", left)
	}
}

// Elements of another policy's sets are not read, nor are any in a Frame, and those that were
// staged are trusted in the set that was filled, and in no other of its name.
func TestElementsAreReadOnlyWhereTheyMayStay(t *testing.T) {
	t.Parallel()
	n, want := modes.New(t, native.Read), small()
	n.Apply(t, want, nft.Contents)
	const set = "inet nft-masq-agent non-masq-v4-a "
	n.Load(t, "delete element "+set+"{ 10.1.0.0/24 }; add element "+set+"{ 9.0.0.0/8 }") // as many as before
	differs := func(want, last nft.Ruleset, depth nft.Depth) bool {
		t.Helper()
		s, err := native.Read(n.Conn, want, last, depth, nil)
		nfttest.NoError(t, err)
		return slices.Contains(modes.Texts(s), "set non-masq-v4-a contains 9.0.0.0/8, which is not in the config")
	}
	other := nft.Compile(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}})
	if !differs(want, want, nft.Contents) || differs(want, want, nft.Frame) || differs(other, other, nft.Contents) {
		t.Error("elements are read in a Frame or of another policy, or not at all")
	}
	if !differs(want, other, nft.Frame) {
		t.Error("elements are not read in a Frame after another policy")
	}

	filled := func(s nft.KernelState) (elements int) {
		t.Helper()
		if err := s.Stage(t.Context(), func(b *nfnetlink.Batch) error {
			elements += b.Elements
			return n.Conn.Commit(b)
		}); err != nil {
			t.Fatal(err)
		}
		return elements
	}
	staged := n.Read(t, other, nft.Contents)
	again := func() nft.KernelState {
		s, err := native.Read(n.Conn, other, nft.Ruleset{}, nft.Contents, staged)
		nfttest.NoError(t, err)
		return s
	}
	if some := filled(again()); some == 0 {
		t.Error("what an earlier attempt did not fill was not filled")
	}
	n.Load(t, "delete set inet nft-masq-agent non-masq-v4-b")
	if some, none := filled(staged), filled(again()); some == 0 || none != 0 {
		t.Errorf("%d elements were filled, then %d", some, none)
	}
	kept := again()
	n.Load(t, "delete set inet nft-masq-agent non-masq-v4-b; add set inet nft-masq-agent non-masq-v4-b "+
		"{ type ipv4_addr; flags interval; comment \"destinations that see the pod's own address\"; }")
	for _, s := range []nft.KernelState{staged, kept} {
		now, after := &nfnetlink.Batch{}, &nfnetlink.Batch{}
		s.Switch(now, after)
		if err := n.Conn.Commit(now); !errors.Is(err, nfnetlink.ErrReadAgain) {
			t.Errorf("rules refer to a set that was created again: %v", err)
		}
	}
	if some := filled(again()); some == 0 {
		t.Error("a set that was created again was not filled")
	}

	n.Load(t, "flush ruleset")
	staged = n.Read(t, other, nft.Contents)
	if some, none := filled(staged), filled(again()); some == 0 || none != 0 {
		t.Errorf("%d elements of a new table were filled, then %d", some, none)
	}
	n.Load(t, "flush ruleset")
	filled(n.Read(t, other, nft.Contents)) // which gives the sets the same handles
	n.Load(t, "flush set inet nft-masq-agent non-masq-v4-a")
	if some := filled(again()); some == 0 {
		t.Error("a set of another table was not filled")
	}
}

// withBlocks has chains to which only maps lead, a set that reaches the last address, and no other rules.
func withBlocks(addresses ...string) nft.Ruleset {
	c := config.Config{
		MasqLinkLocal: true, NonMasqueradeCIDRs: cases.CIDRs("10.1.0.0/24", "10.2.0.0/24", "240.0.0.0/4"),
		MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"), SNATAddresses: cases.CIDRs("198.51.100.8/30"), PortsPerPod: 2000,
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs(addresses...))
}

// A Frame sees what changes a number that the kernel counts. Of other addresses it knows that they are to be written.
func TestFrameSeesWhatTheKernelCounts(t *testing.T) {
	t.Parallel()
	first, second := withBlocks("198.51.100.8", "198.51.100.9"), withBlocks("198.51.100.9", "198.51.100.10")
	n := modes.New(t, native.Read)
	for _, tt := range []struct {
		does  string
		want  nft.Ruleset
		finds []string
	}{
		{"", first, nil},
		{"delete element TABLE non-masq-v4-a { 10.1.0.0/24 }", first, []string{"set non-masq-v4-a lacks 10.1.0.0/24"}},
		{
			"delete element TABLE non-masq-v4-a { 10.1.0.0/24 }; add element TABLE non-masq-v4-a { 10.9.0.0/24 }", first, nil,
		},
		{"add rule TABLE snat-ports-3-v4 accept", first, []string{"chain snat-ports-3-v4: unexpected rule: …"}},
		{"flush chain TABLE snat-ports-3-v4; add rule TABLE snat-ports-3-v4 accept", first, []string{
			"chain snat-ports-3-v4: missing rule: …", "…",
		}},
		{"flush chain TABLE snat-v4", first, []string{"chain snat-v4: missing rule: …", "…"}},
		{"", second, []string{
			"chain snat-ports-0-v4 is to be written again", "…", "chain snat-ports-15-v4 is to be written again",
			"set snat-by-pod-v4-a has the addresses of before",
		}},
	} {
		n.Load(t, "flush ruleset")
		n.Apply(t, first, nft.Contents)
		n.Load(t, strings.ReplaceAll(tt.does, "TABLE", "inet nft-masq-agent"))
		s, err := native.Read(n.Conn, tt.want, first, nft.Frame, nil)
		nfttest.NoError(t, err)
		if strings.HasPrefix(tt.does, "delete element") && nfttest.KernelBefore(t, 6, 18) {
			tt.finds = nil // it counts no elements
		}
		found := modes.Texts(s)
		if !modes.Match(found, tt.finds) {
			t.Errorf("%q: found %q, want %q", tt.does, found, tt.finds)
		}
		nfttest.NoError(t, s.Stage(t.Context(), n.Conn.Commit))
		now, after := &nfnetlink.Batch{}, &nfnetlink.Batch{}
		s.Switch(now, after)
		if wrote := now.Len()+after.Len() > 0; wrote != (len(found) > 0) {
			t.Errorf("%q: that it writes is %t, found %q", tt.does, wrote, found)
		}
		nfttest.NoError(t, errors.Join(n.Conn.Commit(now), n.Conn.Commit(after)))
		if len(found) == 0 {
			continue
		}
		if left := modes.Texts(n.Read(t, tt.want, nft.Contents)); len(left) > 0 {
			t.Errorf("%q: left %q", tt.does, left)
		}
	}
}

// What is not ours goes with the table, in one transaction, also at the first one after a
// rejection; the set that counts connections in two.
func TestTableIsReplacedInOneTransaction(t *testing.T) {
	t.Parallel()
	for does, most := range map[string]int{
		"add quota TABLE x { over 10 mbytes; }":                        1,
		"add table TABLE { flags dormant; }":                           1,
		"delete table TABLE":                                           1,
		"add set TABLE x { type ipv4_addr; flags interval; counter; }": 2,
	} {
		n, want := modes.New(t, native.Read), small()
		n.Apply(t, want, nft.Contents)
		before := listing(t, n)
		n.Load(t, strings.ReplaceAll(does, "TABLE", "inet nft-masq-agent"))
		wrong, calls := errors.New("wrong"), 0
		broken := listing(t, n)
		reject := func(*nfnetlink.Batch) error { return wrong }
		if err := n.Read(t, want, nft.Contents).(nft.Replacer).Replace(reject); !errors.Is(err, wrong) {
			t.Errorf("%s: %v", does, err)
		}
		if diff := cmp.Diff(broken, listing(t, n)); diff != "" {
			t.Errorf("%s: although nothing was written (-before +after):\n%s", does, diff)
		}
		commit := func(b *nfnetlink.Batch) error {
			if b.Len() > 0 {
				calls++
			}
			return n.Conn.Commit(b)
		}
		s := n.Read(t, want, nft.Contents)
		nfttest.NoError(t, s.(nft.Replacer).Replace(commit))
		s, err := native.Read(n.Conn, want, nft.Ruleset{}, nft.Contents, s)
		if err != nil || len(s.Differences()) > 0 != (most > 1) {
			t.Errorf("%s: %v; then there are %v", does, err, s.Differences())
		}
		n.Apply(t, want, nft.Contents)
		if diff := cmp.Diff(before, listing(t, n)); diff != "" || calls != 1 {
			t.Errorf("%s: %d transactions; listing (-before +after):\n%s", does, calls, diff)
		}
	}
}

func TestCountersAreRead(t *testing.T) {
	t.Parallel()
	n := modes.New(t, native.Read)
	if counts, err := native.Counters(n.Conn); err != nil || counts != nil {
		t.Errorf("without a table: %v, %v", counts, err)
	}
	n.Load(t, `table inet nft-masq-agent {
		counter local-v4 { packets 1 bytes 100; }
		counter exempt-v6 { packets 2 bytes 100; }
		counter invalid-v4 { packets 3 bytes 100; }
		counter masqueraded-v6 { packets 4 bytes 100; }
		counter x { packets 5 bytes 100; }
	}`)
	counts, err := native.Counters(n.Conn)
	want := []nft.Counts{
		{Verdict: nft.Local, Packets: 1},
		{IPv6: true, Verdict: nft.Exempt, Packets: 2},
		{Verdict: nft.Invalid, Packets: 3},
		{IPv6: true, Verdict: nft.Masqueraded, Packets: 4},
	}
	if diff := cmp.Diff(want, counts); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

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
	nfttest.NoError(t, err)
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
		rules, err := modes.Rules(a.Conn, nfnetlink.Inet, nft.TableName, chain)
		nfttest.NoError(a.t, err)
		return fmt.Sprintf("%s handle %d", chain, rules[atoi(a.t, n)].Handle)
	})
	return strings.ReplaceAll(text, "TABLE", "inet "+nft.TableName)
}

// catchAll adds the element that matches every other address. nft 1.0.6 cannot add it to a set of
// intervals.
func (a *attacker) catchAll(words ...string) {
	a.t.Helper()
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	nfttest.NoError(a.t, a.elements(words[0], []netlink.Attribute{elementFlags(catchAll)}))
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
		r := nfnetlink.PrefixRange(netip.MustParsePrefix(key))
		elements = append(elements, []netlink.Attribute{address(unix.NFTA_SET_ELEM_KEY, r.First), limit},
			[]netlink.Attribute{address(unix.NFTA_SET_ELEM_KEY, r.Last.Next()), elementFlags(unix.NFT_SET_ELEM_INTERVAL_END)})
	}
	nfttest.NoError(a.t, a.elements(words[0], elements...))
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
	nfttest.NoError(a.t, nfttest.Own(a.t, a.NS, byte(nfnetlink.Inet), nft.TableName, owner|persist).Close())
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
	enforced.Enforce, drops.DropInvalid = true, true
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
		"snat":         nft.Compile(snat, o).WithAddresses(cases.Addrs("198.51.100.211", "198.51.100.212", "2001:db8:5::2")),
	}
}

// The files of testdata/tamperings have the script of an attacker, and all differences that have to be found ("…"
// stands for any others, or for any rest of one), or a part of one. If it cannot be written over, the table is
// replaced.
func TestEachTamperingIsFoundAndReverted(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	for file, want := range tampered() {
		for part := range slices.Chunk(script.Read(t, filepath.Join("testdata", "tamperings", file+".txt")), 10) {
			t.Run(file, func(t *testing.T) {
				t.Parallel()
				n := modes.New(t, native.Read)
				n.Apply(t, want, nft.Contents)
				before := listing(t, n)
				for _, c := range part {
					t.Run(c.Name, func(t *testing.T) {
						a := &attacker{t, n, want}
						finds := a.named(strings.Join(append(c.All('>'), c.All('~')...), "\n"))
						exactly := len(c.All('>')) > 0
						a.run(c.Text())
						s := n.Read(t, want, nft.Contents)
						found := modes.Texts(s)
						ok := slices.ContainsFunc(found, func(d string) bool { return strings.Contains(d, finds) })
						if exactly {
							ok = finds == "nothing" && len(found) == 0 || modes.Match(found, strings.Split(finds, "\n"))
						}
						if !ok {
							t.Errorf("want %q, %d are found: %.300q", finds, len(found), found[:min(5, len(found))])
						}
						if i, ok := s.Installed(); ok && i.Hash != want.Hash() && i.Hash != "" && c.Name != "change comment" {
							t.Errorf("installed is %+v", i)
						}
						odd := slices.ContainsFunc(found, func(d string) bool { return strings.HasPrefix(d, "odd: ") })
						if odd || !exactly { // what is listed in full can be written over
							revert(t, n, s, odd)
						}
						n.Apply(t, want, nft.Contents)
					})
				}
				if diff := cmp.Diff(before, listing(t, n)); diff != "" {
					t.Errorf("nft finds what is left of one of these attacks (-before +after):\n%s", diff)
				}
			})
		}
	}
}

// revert replaces the table if it has something odd, or if the kernel rejects to write it.
func revert(t *testing.T, n *modes.Node, s nft.KernelState, odd bool) {
	t.Helper()
	commit, now, after := n.Conn.Commit, &nfnetlink.Batch{}, &nfnetlink.Batch{}
	err := s.Stage(t.Context(), commit)
	s.Switch(now, after)
	if odd || errors.Join(err, commit(now), commit(after)) != nil {
		nfttest.NoError(t, s.(nft.Replacer).Replace(commit))
	}
}
