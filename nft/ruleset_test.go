package nft_test

import (
	"cmp"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/xtables"
)

// What nft makes of the text is what the bytecode says.
func TestNFTMakesTheBytecodeOfTheText(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	comment := func(s nfnetlink.Set) string {
		return nfnetlink.UserData(s.UserData, byte(userdata.NFTNL_UDATA_SET_COMMENT))
	}
	cases.EachIn(t, nft.ModeNFTables, func(t *testing.T, c cases.Case) {
		c.SkipIfShort(t)
		t.Parallel()
		n, table := modes.New(t, native.Read), c.Compile(nft.ModeNFTables).Tables[0]
		n.Load(t, native.Layout{}.Text([]nft.Table{table}))
		for _, w := range table.Chains {
			got, err := n.Conn.Chain(table.Family, table.Name, w.Name)
			if err != nil || !got.Hook.Equal(w.KernelChain(table).Hook) || w.Hook != nil && got.Policy != nfnetlink.Accept {
				t.Errorf("chain %s: %+v, %v", w.Name, got, err)
			}
			rules, err := modes.Rules(n.Conn, table.Family, table.Name, w.Name)
			if diff := w.Difference("chain "+w.Name, w.Bytecode(table, nil), rules, nft.SameRule); err != nil || diff != "" {
				t.Errorf("%s %v", diff, err)
			}
		}
		sets, err := n.Conn.Sets(table.Family, table.Name)
		if err != nil || len(sets) != len(table.Sets) {
			t.Fatalf("%d sets: %v", len(sets), err)
		}
		for i, w := range table.Sets {
			want, got := w.KernelSet(table, w.Name+nft.SideA), sets[i]
			if comment(got) != comment(want) || comment(want) != w.Comment {
				t.Errorf("set %s has the comment %q, want %q", w.Name, comment(want), comment(got))
			}
			got.Handle, got.Count, got.Counted, got.UserData, want.UserData = 0, 0, false, nil, nil
			if diff := gocmp.Diff(got, want); diff != "" {
				t.Errorf("set %s (-nft +ours):\n%s", w.Name, diff)
			}
		}
	})
	// Of user data, nft reads the byte order, without which it prints addresses backwards.
	s := nft.Set{Name: "s", Comment: "c", Mappings: []nfnetlink.Mapping{}}
	for learned, want := range map[bool][2]string{false: {"\x02", "\x02"}, true: {}} {
		s.Learned = learned
		b := s.KernelSet(nft.Table{}, "s-a").UserData
		got := [2]string{
			strings.Trim(nfnetlink.UserData(b, byte(userdata.NFTNL_UDATA_SET_KEYBYTEORDER)), "\x00"),
			strings.Trim(nfnetlink.UserData(b, byte(userdata.NFTNL_UDATA_SET_DATABYTEORDER)), "\x00"),
		}
		if got != want {
			t.Errorf("learned %t: %q, want %q", learned, got, want)
		}
	}
}

// Letters stand for rules, capital ones for the same with a comment.
func TestFirstDifferenceOfAChainIsNamed(t *testing.T) {
	ruleOf := func(letter rune) nft.Rule {
		name, comment := strings.ToLower(string(letter)), ""
		if name != string(letter) {
			comment = "c"
		}
		exprs := nfnetlink.Marshal(nfnetlink.Inet, &expr.Objref{Type: 1, Name: name})
		return nft.Rule{Statements: []nft.Statement{{Text: name, Exprs: exprs}}, Comment: comment}
	}
	for _, tt := range []struct{ want, got, diff string }{
		{"abc", "abc", ""},
		{"", "", ""},
		{"abc", "", "-a"},
		{"", "ab", "+a"},
		{"abc", "ac", "-b"},
		{"abc", "abbc", "+b"},
		{"abc", "abcabc", "+a"},
		{"abc", "xabc", "+x"},
		{"abc", "ab", "-c"},
		{"abc", "acb", "-b"},
		{"abcd", "axcd", "-b"},
		{"aB", "aB", ""},
		{"aB", "ab", `-b comment "c"`},
		{"ab", "aB", "-b"},
		{"ab", "abC", "+c, comment c"},
	} {
		var c nft.Chain
		var got nft.Chain
		for _, letter := range tt.want {
			c.Rules = append(c.Rules, ruleOf(letter))
		}
		for _, letter := range tt.got {
			got.Rules = append(got.Rules, ruleOf(letter))
		}
		rules := got.Bytecode(nft.Table{}, nil)
		names := []string{"c: missing rule: ", "-"}
		for i, letter := range strings.ToLower(tt.got) {
			rules[i].Handle = uint64(letter)
			names = append(names, fmt.Sprintf("c: unexpected rule: handle %d", letter), "+"+string(letter))
		}
		diff := c.Difference("c", c.Bytecode(nft.Table{}, nil), rules, nft.SameRule)
		diff = strings.NewReplacer(names...).Replace(diff)
		if diff != tt.diff {
			t.Errorf("%s, got %s: %q, want %q", tt.want, tt.got, diff, tt.diff)
		}
	}
}

func TestRulesetsAreTheSameIfTheKernelShouldHaveTheSame(t *testing.T) {
	compile := func(m nft.Mode, chain string, list ...string) nft.Ruleset {
		c := config.Config{NonMasqueradeCIDRs: cases.CIDRs(list...)}
		return nft.Compile(c, nft.Options{Layout: cases.Layout(m, chain)})
	}
	snat := func(has ...string) nft.Ruleset {
		c := config.Config{SNATAddresses: cases.CIDRs("198.51.100.8/30"), SNATRules: []config.SNATRule{
			{
				To: cases.CIDRs("203.0.113.0/24"), Out: []config.Interface{{Name: "w*"}},
				Addresses: cases.CIDRs("198.51.100.20/32"),
			},
		}}
		return nft.Compile(c, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs(has...))
	}
	const a, b = "10.0.0.0/8", "192.0.2.0/24"
	for i, tt := range []struct {
		a, b nft.Ruleset
		same bool
	}{
		{compile(nft.ModeNFTables, "", a, b), compile(nft.ModeNFTables, "", b, a), true},
		{compile(nft.ModeNFTables, "", a, b), compile(nft.ModeNFTables, "", a), false},
		{compile(nft.ModeNFTables, "", a, b), compile(nft.ModeIPTables, "X", a, b), false},
		{compile(nft.ModeIPTables, "X", a, b), compile(nft.ModeIPTables, "X", a, b), true},
		{compile(nft.ModeIPTables, "X", a, b), compile(nft.ModeIPTables, "X", b, a), false},
		{compile(nft.ModeIPTables, "X", a, b), compile(nft.ModeIPTables, "Y", a, b), false},
		{snat("198.51.100.8"), snat("198.51.100.8", "192.0.2.7"), true},
		{snat("198.51.100.8"), snat("198.51.100.8", "198.51.100.20"), false},
		{snat("198.51.100.8"), snat(), false},
		{nft.Ruleset{}, nft.Ruleset{}, true},
	} {
		if got := tt.a.Same(tt.b); got != tt.same || tt.b.Same(tt.a) != tt.same {
			t.Errorf("%d: %t", i, got)
		}
	}
	r := snat("198.51.100.8")
	if got := r.Policy.Families[0].SNAT[0].String(); got != "to 203.0.113.0/24 leaves from 198.51.100.20 by w*" {
		t.Error(got)
	}
	for i, has := range []string{"198.51.100.8", "198.51.100.20"} {
		if present, absent := snat(has).Policy.CountSNATRules(); present != i || absent != 1-i {
			t.Errorf("with %s, %d entries have an address, and %d have none", has, present, absent)
		}
	}
	for _, tt := range []struct {
		r          nft.Ruleset
		mode       nft.Mode
		chain      string
		ipv4, ipv6 int
	}{
		{nft.Ruleset{}, "", "", 0, 0},
		{compile(nft.ModeIPTables, "X", a, a, b), nft.ModeIPTables, "X", 3, 0},
		{r, nft.ModeNFTables, "", 1, 0},
		{nft.Compile(config.Config{
			EnableIPv6:         true,
			NonMasqueradeCIDRs: cases.CIDRs(a, "fd00::/8", "fd01::/16", "2001:db8::/32"),
		},
			nft.Options{Layout: native.Layout{}}), nft.ModeNFTables, "", 2, 3},
	} {
		ipv4, ipv6 := tt.r.CIDRs()
		if tt.r.Mode() != tt.mode || tt.r.Chain() != tt.chain || ipv4 != tt.ipv4 || ipv6 != tt.ipv6 {
			t.Errorf("mode %q, chain %q, %d and %d CIDRs, want %+v", tt.r.Mode(), tt.r.Chain(), ipv4, ipv6, tt)
		}
	}
	if n := r.Elements(); n != 2 { // link-local destinations, and snatAddresses
		t.Errorf("%d elements", n)
	}
	table := r.Tables[0]
	if c := table.Chain("postrouting"); len(c.Rules) == 0 {
		t.Error("the chain has no rules")
	}
	if c := table.Chain("other"); c.Name != "other" || len(c.Rules) > 0 || c.Hook != nil {
		t.Errorf("%+v", c)
	}
}

func TestOursAreTheWantedChains(t *testing.T) {
	want := nft.Compile(config.Config{}, nft.Options{Layout: xtables.Layout{ChainName: "B"}})
	for _, tt := range []struct {
		family       nfnetlink.Family
		table, chain string
		owns         bool
	}{
		{nfnetlink.IPv4, "nat", "B", true},
		{nfnetlink.IPv6, "nat", "B", false}, // IPv6 is not wanted
		{nfnetlink.IPv4, "nat", "POSTROUTING", false},
		{nfnetlink.IPv4, "filter", "B", false},
		{nfnetlink.IPv4, "nat", "A", false},
		{nfnetlink.Inet, "nat", "B", false},
		{nfnetlink.Inet, nft.TableName, "any", true},
		{nfnetlink.IPv4, nft.TableName, "any", false},
	} {
		if got := want.Owns(nfnetlink.Chain{Family: tt.family, Table: tt.table, Name: tt.chain}); got != tt.owns {
			t.Errorf("%s %s %s: %t", tt.family, tt.table, tt.chain, got)
		}
	}
	for _, tt := range []struct {
		family nfnetlink.Family
		table  string
		has    bool
	}{
		{nfnetlink.IPv4, "nat", true},
		{nfnetlink.IPv6, "nat", false},
		{nfnetlink.IPv4, "filter", false},
	} {
		if got := want.HasTable(nfnetlink.Table{Family: tt.family, Name: tt.table}); got != tt.has {
			t.Errorf("table %s %s: %t", tt.family, tt.table, got)
		}
	}
}

// The entries can be wider than the addresses from which connections can leave.
func TestAddressesOfTheNodeAreThoseFromWhichConnectionsLeave(t *testing.T) {
	c := config.Config{EnableIPv6: true, SNATAddresses: cases.CIDRs("0.0.0.0/0", "2000::/3")}
	for in, want := range map[string]string{
		"127.0.0.1 169.254.0.7 224.0.0.1 ::1 fe80::1": "[] []",
		"198.51.100.8 198.51.100.7 198.51.100.8":      "[198.51.100.7 198.51.100.8] []",
		"2001:db8::1 fd00::1":                         "[] [2001:db8::1]",
	} {
		r := nft.Compile(c, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs(strings.Fields(in)...))
		f := r.Policy.Families
		if got := fmt.Sprint(f[0].PresentAddresses(), f[1].PresentAddresses()); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestEntriesAreFoundByAddress(t *testing.T) {
	list := nft.NewList(cases.CIDRs("10.2.0.0/16", "10.0.0.0/16", "10.0.7.0/24"))
	for address, want := range map[string]string{
		"10.0.7.1": "10.0.0.0/16", "10.2.255.255": "10.2.0.0/16", "10.1.0.0": "", "9.255.255.255": "", "10.3.0.0": "",
	} {
		a := netip.MustParseAddr(address)
		entry, found := list.Find(a)
		if !found && want == "" && !list.Contains(a) {
			continue
		}
		if !found || entry.String() != want || !list.Contains(a) {
			t.Errorf("%s is in %s, %t; want %q", address, entry, found, want)
		}
	}
}

func TestFamiliesHaveNames(t *testing.T) {
	for ipv6, want := range map[bool]string{false: "IPv4 ipv4 -v4 ip", true: "IPv6 ipv6 -v6 ip6"} {
		f := nft.FamilyPolicy{IPv6: ipv6}
		got := fmt.Sprint(nft.FamilyName(ipv6), " ", nft.FamilyKey(ipv6), " ", f.Suffix(), " ", f.NetfilterFamily())
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// What a config sets decides, not the flags.
func TestBuildTakesWhatTheFileSaysAndRejectsWhatCannotBe(t *testing.T) {
	const sources = "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	for _, tt := range []struct {
		file   string
		layout nft.Layout
		want   string // the ports, whether random, the marks, whether invalid packets are dropped; or a problem
	}{
		{"", native.Layout{}, "[1024-2047] true 0 false"},
		{"toPorts: 5-6\nrandomFully: false\n", native.Layout{}, "[5-6] false 0 false"},
		{"toPorts: 5-6\nrandomFully: false\n", xtables.Layout{ChainName: "X"}, "[5-6] false 0 false"},
		{sources + "enforceNonMasquerade: true\n", native.Layout{}, "[1024-2047] true 1 false"},
		{sources + "dropInvalid: true\n", native.Layout{}, "[1024-2047] true 0 true"},
		{"nonMasqueradeCIDRs: 5\n", native.Layout{}, "f:1:21: "},
		{sources, xtables.Layout{ChainName: "X"}, "f:1:1: masqueradeSrcCIDRs needs mode nftables"},
		{"masqueradeHost: true\n", xtables.Layout{ChainName: "X"}, "f:1:17: masqueradeHost needs mode nftables"},
		{"", xtables.Layout{ChainName: strings.Repeat("X", 28)}, "[1024-2047] true 0 false"},
	} {
		o := nft.Options{
			Layout: tt.layout, RandomFully: true, Ports: []nft.PortRange{{Min: 1024, Max: 2047}},
			Marks: []nft.Mark{{Value: 1, Mask: 1}},
		}
		b := nft.Build(config.Defaults{}, o, config.Source{Name: "f", Data: []byte(tt.file)})
		got := fmt.Sprint(b.Problems.Err())
		if b.Ruleset != nil {
			p, marks := b.Ruleset.Policy, 0
			if p.Enforce != nil {
				marks = len(p.Enforce.Marks)
			}
			got = fmt.Sprint(p.Ports, " ", p.RandomFully, " ", marks, " ", p.DropInvalid)
		}
		if !strings.HasPrefix(got, tt.want) {
			t.Errorf("%q: %s, want %s", tt.file, got, tt.want)
		}
	}
	c := config.Config{
		MasqueradeSrcCIDRs: cases.CIDRs("10.0.0.0/8"), DropInvalid: true,
		Enforce: true,
	}
	if p := nft.NewPolicy(c, nft.Options{Layout: xtables.Layout{ChainName: "X"}}); p.DropInvalid || p.Enforce != nil ||
		len(p.Families[0].Conditions) != 1 { // the list of exempt destinations
		t.Errorf("%+v", p)
	}
	p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
	if f := p.Families[0]; !p.Drops(f) || !p.Enforces(f) {
		t.Errorf("%+v", p)
	}
	c.MasqueradeSrcCIDRs = nil
	if p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}); p.Drops(p.Families[0]) || p.Enforces(p.Families[0]) {
		t.Errorf("%+v", p)
	}
}

func TestMarksAreParsed(t *testing.T) {
	for in, want := range map[string]string{
		"0x4000/0x4000":               "0x4000/0x4000",
		"0x4000/0x4000,0x2000/0xf000": "0x4000/0x4000 0x2000/0xf000",
		"5":                           "0x5/0xffffffff",
		"0x1/0x0":                     "matches no packet",
		"0x0/0x1":                     "matches no packet",
		"0x0/0x0":                     "matches no packet",
		"0x3/0x1":                     "matches no packet",
		"":                            "is not a mark",
		"x":                           "is not a mark",
		"0x1/":                        "is not a mark",
		"0x1/x":                       "is not a mark",
		"x/0x1":                       "is not a mark",
		"0x100000000":                 "is not a mark",
		"1,2,3,4,5,6,7,8,9":           "more than 8",
	} {
		marks, err := nft.ParseMarks(in)
		got := strings.Trim(fmt.Sprint(marks), "[]")
		if err != nil {
			got = err.Error()
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
	if marks, err := nft.ParseMarks("1,2,3,4,5,6,7,8"); err != nil || len(marks) != 8 {
		t.Errorf("%v: %v", marks, err)
	}
}

func TestInterfacesThatNoOtherEntryCoversAreKept(t *testing.T) {
	var names []config.Interface
	for i, name := range []string{"veth1", "wg0", "veth*", "cni0", "wg0", "veth1*"} {
		names = append(names, config.Interface{Name: name, Pos: config.Position{File: "f", Line: i + 1, Col: 1}})
	}
	p := nft.NewPolicy(config.Config{MasqueradeOutInterfaces: names}, nft.Options{Layout: native.Layout{}})
	var kept []string
	for _, condition := range p.Families[0].Conditions {
		for _, i := range condition.Interfaces {
			kept = append(kept, fmt.Sprint(i.Name, i.Pos.Line))
		}
	}
	if want := []string{"cni04", "veth*3", "wg02"}; !slices.Equal(kept, want) {
		t.Errorf("kept %q, want %q", kept, want)
	}
}

func TestMain(m *testing.M) {
	os.Exit(nfttest.Main(m))
}

// Without errors there is a ruleset: that of the config, or with mistakes what the
// older agents make of it.
func TestFilesWithMistakesAloneHaveARuleset(t *testing.T) {
	const long = "A-CHAIN-OF-25-CHARACTERS-"
	native, iptables := cases.Modes()[:1], cases.Modes()[1:]
	for _, tt := range []struct {
		file, chain string
		modes       []nft.Mode
		level       config.Level
		ids         string // of the problems
		has         string // in the ruleset; "": there is no ruleset
	}{
		{"", "", cases.Modes(), config.Note, "emptyFile", "192.168.0.0/16"},
		{"masqLinkLocal: true\nextra: 1", "", cases.Modes(), config.Warning, "unknownKey", "10.0.0.0/8"},
		{"masqLinkLocal: true\n---\n@", "", cases.Modes(), config.Mistake, "secondDocument", "10.0.0.0/8"},
		{"nonMasqueradeCIDRs: [10.0.0.0/010]", "", cases.Modes(), config.Error, "invalidEntry", ""},
		{"masqLinkLocal: 1\nmasqLinklLocal: true", "", cases.Modes(), config.Error, "wrongValue,misspelledKey", ""},
		{"masqueradeHost: false", "", native, config.Note, "", "to this node"},
		{"masqueradeHost: false", "", iptables, config.Error, "needsNFTables", ""},
		{
			"masqueradeHost: false\nx: 1\nx: 1", "", iptables, config.Error,
			"unknownKey,duplicateKey,unknownKey,needsNFTables", "",
		},
		{"", long, iptables, config.Note, "emptyFile", long},
	} {
		for _, mode := range tt.modes {
			o := nft.Options{Layout: cases.Layout(mode, cmp.Or(tt.chain, "X"))}
			b := nft.Build(config.Defaults{}, o, config.Source{Name: "f", Data: []byte(tt.file)})
			var ids []string
			for _, p := range b.Problems {
				ids = append(ids, p.ID)
			}
			level, got := b.Problems.Worst(), strings.Join(ids, ",")
			if got != tt.ids || level != tt.level || (b.Ruleset == nil) != (tt.has == "") ||
				b.Ruleset != nil && !strings.Contains(b.Ruleset.String(), tt.has) {
				t.Errorf("%s, %.40q: %s %s, want %s in ruleset %v", mode, tt.file, level, got, tt.has, b.Ruleset)
			}
		}
	}
}

var update = flag.Bool("update", false, "regenerate the golden files in testdata/cases")

func TestRulesetsMatchTheGoldenFiles(t *testing.T) {
	golden := map[nft.Mode]string{nft.ModeNFTables: "ruleset.nft", nft.ModeIPTables: "iptables.rules"}
	cases.Each(t, func(t *testing.T, c cases.Case) {
		for _, m := range c.Modes() {
			got := c.Compile(m).String()
			if *update {
				nfttest.NoError(t, os.WriteFile(filepath.Join(c.Dir, golden[m]), []byte(got), 0o644))
			}
			if diff := gocmp.Diff(c.File(t, golden[m]), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", golden[m], diff)
			}
		}
	})
}
