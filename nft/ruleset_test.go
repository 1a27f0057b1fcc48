package nft_test

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/layouts"
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
		return facts.UserData(s.UserData, byte(userdata.NFTNL_UDATA_SET_COMMENT))
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
			rules, _, err := n.Conn.FirstRules(table.Family, table.Name, w.Name, func(nfnetlink.Rule) bool { return false })
			if diffs := w.Differences("chain "+w.Name, table, nil, rules); err != nil || len(diffs) > 0 {
				t.Errorf("%v %v", diffs, err)
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
			got.Handle, got.Count, got.UserData, want.UserData = 0, 0, nil, nil
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
			strings.Trim(facts.UserData(b, byte(userdata.NFTNL_UDATA_SET_KEYBYTEORDER)), "\x00"),
			strings.Trim(facts.UserData(b, byte(userdata.NFTNL_UDATA_SET_DATABYTEORDER)), "\x00"),
		}
		if got != want {
			t.Errorf("learned %t: %q, want %q", learned, got, want)
		}
	}
}

// Letters stand for rules.
func TestDifferencesOfChainsCountEachRule(t *testing.T) {
	ruleOf := func(letter rune) nft.Rule {
		exprs := nfnetlink.Marshal(nfnetlink.Inet, &expr.Objref{Type: 1, Name: string(letter)})
		return nft.Rule{Nodes: []nft.Node{{Text: string(letter), Exprs: exprs}}}
	}
	for _, tt := range []struct{ want, got, diffs string }{
		{"abc", "abc", ""},
		{"", "", ""},
		{"abc", "", "-a -b -c"},
		{"", "ab", "+a +b"},
		{"abc", "ac", "-b"},
		{"abc", "abbc", "+b"},
		{"abc", "abcabc", "+a +b +c"},
		{"abbc", "abc", "-b"},
		{"aabb", "ab", "-a -b"},
		{"abc", "acb", "order"},
		{"abc", "cba", "order"},
		{"abcd", "axcd", "-b +x"},
		{"abcd", "abxyd", "-c +x +y"},
		{"abcd", "dcbaa", "+a"},
	} {
		var c nft.Chain
		var got nft.Chain
		for _, letter := range tt.want {
			c.Rules = append(c.Rules, ruleOf(letter))
		}
		for _, letter := range tt.got {
			got.Rules = append(got.Rules, ruleOf(letter))
		}
		diffs := strings.Join(c.Differences("c", nft.Table{}, nil, got.Bytecode(nft.Table{}, nil)), " ")
		diffs = strings.NewReplacer("c: missing rule: ", "-", "c: unexpected rule: counter name ", "+",
			"c has its rules in another order", "order").Replace(diffs)
		if diffs != tt.diffs {
			t.Errorf("%s, got %s: %q, want %q", tt.want, tt.got, diffs, tt.diffs)
		}
	}
}

func TestRulesetsAreTheSameIfTheKernelShouldHaveTheSame(t *testing.T) {
	compile := func(m nft.Mode, chain string, list ...string) nft.Ruleset {
		c := config.Config{NonMasqueradeCIDRs: cases.CIDRs(list...)}
		return nft.Compile(c, nft.Options{Layout: layouts.Of(m, chain)})
	}
	snat := func(has ...string) nft.Ruleset {
		c := config.Config{SNATAddresses: cases.CIDRs("198.51.100.8/30"), SNATRules: []config.SNATRule{
			{To: cases.CIDRs("203.0.113.0/24"), Addresses: cases.CIDRs("198.51.100.20/32")},
		}}
		var addresses []netip.Addr
		for _, a := range has {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		return nft.Compile(c, nft.Options{Layout: native.Layout{}}).On(addresses)
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
	table := r.Tables[0]
	if c := table.Chain("postrouting"); len(c.Rules) == 0 {
		t.Error("the chain has no rules")
	}
	if c := table.Chain("other"); c.Name != "other" || len(c.Rules) > 0 || c.Hook != nil {
		t.Errorf("%+v", c)
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
		{"toPorts: 5-6\nrandomFully: false\n", xtables.Layout{Name: "X"}, "[5-6] false 0 false"},
		{sources + "enforceNonMasquerade: true\n", native.Layout{}, "[1024-2047] true 1 false"},
		{sources + "dropInvalid: true\n", native.Layout{}, "[1024-2047] true 0 true"},
		{sources + "dropInvalid: true\n", xtables.Layout{Name: "X"}, "f:2:14: dropInvalid needs mode nftables"},
		{"nonMasqueradeCIDRs: 5\n", native.Layout{}, "f:1:21: "},
		{
			sources,
			xtables.Layout{Name: strings.Repeat("X", 28)},
			`chain name "` + strings.Repeat("X", 28) + `": has 28 characters, at most 23`,
		},
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
		MasqueradeSrcCIDRs: cases.CIDRs("10.0.0.0/8"), DropInvalid: &config.Position{},
		Enforce: &config.Position{},
	}
	if p := nft.NewPolicy(c, nft.Options{Layout: xtables.Layout{Name: "X"}}); p.DropInvalid || p.Enforce != nil {
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

func TestSourcePortsAreCountedOnce(t *testing.T) {
	for _, tt := range []struct {
		ports []nft.PortRange
		want  int
	}{
		{nil, 65536 - 1024},
		{[]nft.PortRange{{Min: 1, Max: 65535}}, 65535},
		{[]nft.PortRange{{Min: 5, Max: 5}}, 1},
		{[]nft.PortRange{{Min: 5, Max: 9}, {Min: 8, Max: 10}, {Min: 5, Max: 5}}, 6},
	} {
		among := nft.Policy{Ports: tt.ports}.SourcePorts()
		member := 0
		for port := range math.MaxUint16 + 1 {
			scope, ok := among(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(port)))
			if ok {
				member++
			}
			if scope != (nft.PortScope{Block: -1, Ports: tt.want}) {
				t.Fatalf("%v: port %d is among %+v, want %d", tt.ports, port, scope, tt.want)
			}
		}
		if member != tt.want {
			t.Errorf("%v: %d are named, want %d", tt.ports, member, tt.want)
		}
	}
	names := ""
	for _, p := range append(nft.PortProtocols(), 33) {
		names += p.String() + " "
	}
	if names != "tcp udp sctp 33 " {
		t.Error(names)
	}
}

// Each step names the condition, where it is, and what it says.
func TestExplanationOfEachKindOfCondition(t *testing.T) {
	at := func(line int) config.Position { return config.At("f", line, 1) }
	host := at(1)
	p := nft.NewPolicy(config.Config{
		ExemptHost:                 &host,
		MasqueradeSrcInterfaces:    []config.Interface{{Name: "cni*", Pos: at(2)}, {Name: "veth1", Pos: at(3)}},
		NonMasqueradeSrcCIDRs:      cases.CIDRs("10.244.9.0/24"),
		NonMasqueradeOutInterfaces: []config.Interface{{Name: "wg*", Pos: at(4)}},
		MasqueradeOutInterfaces:    []config.Interface{{Name: "*", Pos: at(5)}},
		MasqLinkLocal:              true,
	}, nft.Options{Layout: native.Layout{}})
	steps := func(all []nft.Step) (texts []string) {
		for _, s := range all[1:] {
			text := fmt.Sprintf("%s %t", s.Key, s.Yes)
			if s.CIDR.IsValid() {
				text += " " + s.CIDR.Text()
			}
			if s.CIDR.Pos != (config.Position{}) {
				text += " " + s.CIDR.Pos.String()
			}
			if s.Name != "" {
				text += " " + s.Name
			}
			if s.Decides {
				text += " " + string(s.Verdict)
			}
			texts = append(texts, text)
		}
		return texts
	}
	c := nft.Connection{Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9")}
	from := func(change func(*nft.Connection)) nft.Connection {
		d := c
		d.In, d.Out = "veth1", "eth0"
		change(&d)
		return d
	}
	yes := func(nft.Question) bool { return true }
	no := func(nft.Question) bool { return false }
	for _, tt := range []struct {
		name string
		got  []nft.Step
		want []string
	}{
		{"of the node", p.Explain(from(func(c *nft.Connection) { c.FromNode = true })), []string{
			"masqueradeHost true f:1:1 exempt",
		}},
		{"of a pod", p.Explain(from(func(*nft.Connection) {})), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:3:1 veth1", "nonMasqueradeSrcCIDRs false",
			"nonMasqueradeOutInterfaces false", "masqueradeOutInterfaces true f:5:1 *", " true masqueraded",
		}},
		{"of a mapped address", p.Explain(from(func(c *nft.Connection) {
			c.Src, c.Dst = netip.MustParseAddr("::ffff:10.244.9.2"), netip.MustParseAddr("::ffff:203.0.113.9")
		})), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:3:1 veth1",
			"nonMasqueradeSrcCIDRs true 10.244.9.0/24 exempt",
		}},
		{"by a tunnel", p.Explain(from(func(c *nft.Connection) { c.In, c.Out = "cni0", "wg0" })), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:2:1 cni*", "nonMasqueradeSrcCIDRs false",
			"nonMasqueradeOutInterfaces true f:4:1 wg* exempt",
		}},
		{"from elsewhere", p.Explain(from(func(c *nft.Connection) { c.In = "docker0" })), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces false exempt",
		}},
		{"by no interface", p.Explain(from(func(c *nft.Connection) { c.Out = "" })), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true f:3:1 veth1", "nonMasqueradeSrcCIDRs false",
			"nonMasqueradeOutInterfaces false", "masqueradeOutInterfaces false exempt",
		}},
		{"all sources of the lists", p.ExplainSources(from(func(c *nft.Connection) { c.In = "docker0" }), yes), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces true", "nonMasqueradeSrcCIDRs true exempt",
		}},
		{"all other sources", p.ExplainSources(from(func(*nft.Connection) {}), no), []string{
			"masqueradeHost false f:1:1", "masqueradeSrcInterfaces false exempt",
		}},
	} {
		if got := steps(tt.got); !slices.Equal(got, tt.want) {
			t.Errorf("%s:\n\t%q\nwant\n\t%q", tt.name, got, tt.want)
		}
	}
}

func TestListsKeepWhatNoOtherEntryCovers(t *testing.T) {
	written := cases.CIDRs("10.1.0.0/16", "10.0.0.0/8", "192.0.2.0/24", "10.0.0.0/8", "10.1.2.0/24", "11.0.0.0/8")
	for i := range written {
		written[i].Pos.Line = i + 1
	}
	l := nft.NewList(written)
	var covered []string
	for dropped, by := range l.Covered() {
		covered = append(covered, fmt.Sprintf("%d by %d", dropped.Pos.Line, by.Pos.Line))
	}
	if want := []string{"1 by 2", "4 by 2", "5 by 2"}; !slices.Equal(covered, want) {
		t.Errorf("covered are %q, want %q", covered, want)
	}
	for range l.Covered() {
		break
	}
	if got := config.Texts(l.CIDRs); strings.Join(got, " ") != "10.0.0.0/8 192.0.2.0/24 11.0.0.0/8" {
		t.Errorf("kept %q", got)
	}
	if got := fmt.Sprint(l.Prefixes()); got != "[10.0.0.0/8 11.0.0.0/8 192.0.2.0/24]" {
		t.Errorf("sorted %s", got)
	}
	var names []config.Interface
	for i, name := range []string{"veth1", "wg0", "veth*", "cni0", "wg0", "veth1*"} {
		names = append(names, config.Interface{Name: name, Pos: config.At("f", i+1, 1)})
	}
	p := nft.NewPolicy(config.Config{
		MasqueradeOutInterfaces: names, EnableIPv6: true, MasqLinkLocal: true,
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "fd00::/8"), ForceMasqueradeCIDRs: cases.CIDRs("10.1.0.0/16"),
		MasqueradeSrcCIDRs: cases.CIDRs("10.2.0.0/16"),
	}, nft.Options{Layout: native.Layout{}})
	var kept []string
	for _, q := range p.Families[0].Questions {
		for _, i := range q.Interfaces {
			kept = append(kept, fmt.Sprint(i.Name, i.Pos.Line))
		}
	}
	if want := []string{"cni04", "veth*3", "wg02"}; !slices.Equal(kept, want) {
		t.Errorf("kept %q, want %q", kept, want)
	}
	if got := fmt.Sprint(p.ExemptDestinations()); got != "[10.0.0.0/8 fd00::/8 fe80::/10]" {
		t.Errorf("exempt are %s", got)
	}
}

// snatPolicy has entries of snatRules of which some are for one family alone.
func snatPolicy(has string) nft.Policy {
	c := config.Config{
		EnableIPv6:    true,
		SNATAddresses: cases.CIDRs("198.51.100.8/30", "198.51.100.64/32", "2001:db8:5::/64"),
	}
	c.SNATRules = []config.SNATRule{
		{From: cases.CIDRs("10.244.8.0/24"), To: cases.CIDRs("203.0.113.0/24"), Addresses: cases.CIDRs("198.51.100.30/32")},
		{Out: []config.Interface{{Name: "wan*"}}, Addresses: cases.CIDRs("198.51.100.40/32")},
		{From: cases.CIDRs("fd00:8::/64"), Addresses: cases.CIDRs("198.51.100.20/32", "2001:db8:6::1/128")},
		{To: cases.CIDRs("203.0.113.0/24"), Addresses: cases.CIDRs("2001:db8:6::2/128")}, // for no family
		{From: cases.CIDRs("10.244.0.0/16"), Addresses: cases.CIDRs("198.51.100.50/31")},
	}
	var addresses []netip.Addr
	for a := range strings.FieldsSeq(has) {
		addresses = append(addresses, netip.MustParseAddr(a))
	}
	return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(addresses)
}

func TestSourceOfAConnection(t *testing.T) {
	const pool, other, partner, world = "10.244.8.2", "10.244.9.2", "203.0.113.9", "192.0.2.99"
	const all = "198.51.100.9 198.51.100.8 198.51.100.30 198.51.100.40 198.51.100.51 198.51.100.50 2001:db8:6::1 " +
		"2001:db8:5::9 198.51.100.8 127.0.0.1 192.0.2.1"
	for _, tt := range []struct {
		has, src, dst, out string
		want               string
	}{
		{all, pool, partner, "eth0", "1 [198.51.100.30]"},
		{all, pool, world, "eth0", "5 [198.51.100.50 198.51.100.51]"},
		{all, other, partner, "eth0", "5 [198.51.100.50 198.51.100.51]"},
		{all, pool, world, "wan0", "2 [198.51.100.40]"},
		{all, "10.9.9.9", world, "eth0", "0 [198.51.100.8 198.51.100.9]"},
		{all, "fd00:8::2", "2001:db8:1::9", "eth0", "3 [2001:db8:6::1]"},
		{all, "fd00:9::2", "2001:db8:1::9", "eth0", "0 [2001:db8:5::9]"},
		{"198.51.100.50", pool, partner, "wan0", "5 [198.51.100.50]"},
		{"192.0.2.1", pool, partner, "wan0", "0 []"},
	} {
		c := nft.Connection{Src: netip.MustParseAddr(tt.src), Dst: netip.MustParseAddr(tt.dst), Out: tt.out}
		s, r := snatPolicy(tt.has).SourceOf(c)
		place := 0
		if len(r) > 0 && len(r[len(r)-1].Present) > 0 {
			place = r[len(r)-1].Place
		}
		if got := fmt.Sprint(place, " ", s.Present); got != tt.want {
			t.Errorf("%s to %s by %s: %s, want %s", tt.src, tt.dst, tt.out, got, tt.want)
		}
	}
	p, none := snatPolicy(all), snatPolicy("192.0.2.1")
	present, absent := p.SNATRules()
	if present != 4 || absent != 0 {
		t.Errorf("%d present, %d absent", present, absent)
	}
	if present, absent := none.SNATRules(); present != 0 || absent != 4 {
		t.Errorf("%d present, %d absent", present, absent)
	}
	if got := fmt.Sprint(p.Families[0].Sources(),
		p.Families[1].Sources()); got != "[198.51.100.8 198.51.100.9 198.51.100.30 "+
		"198.51.100.40 198.51.100.50 198.51.100.51] [2001:db8:5::9 2001:db8:6::1]" {
		t.Errorf("sources %s", got)
	}
	if !p.Families[0].Translates() || none.Families[0].Translates() {
		t.Error("the node has addresses, or not")
	}
	if a, b := p.SNATOf(false).Absent(), none.SNATOf(false).Absent(); len(a) != 1 || len(b) != 2 {
		t.Errorf("%v and %v absent", a, b)
	}
	if len(p.SNATOf(true).Absent()) != 0 || !p.HasSNAT() || (nft.Policy{Families: make([]nft.FamilyPolicy, 2)}).HasSNAT() {
		t.Error("HasSNAT, or what is absent of IPv6")
	}
	six := nft.NewPolicy(config.Config{EnableIPv6: true, SNATRules: []config.SNATRule{
		{Out: []config.Interface{{Name: "wan0"}}, Addresses: cases.CIDRs("2001:db8:6::1/128")},
	}}, nft.Options{Layout: native.Layout{}})
	if !six.HasSNAT() {
		t.Error("only of IPv6")
	}
	four := nft.NewPolicy(config.Config{
		EnableIPv6: true, SNATAddresses: cases.CIDRs("198.51.100.90/32"),
		SNATRules: []config.SNATRule{{
			Out: []config.Interface{{Name: "wan0"}}, Addresses: cases.CIDRs("198.51.100.30/32", "2001:db8:6::1/128"),
		}},
	}, nft.Options{Layout: native.Layout{}}).On([]netip.Addr{
		netip.MustParseAddr("198.51.100.90"), netip.MustParseAddr("198.51.100.30"),
	})
	present, absent = four.SNATRules()
	if got := fmt.Sprint(present, absent, four.Families[0].Sources()); got != "1 0 [198.51.100.30 198.51.100.90]" {
		t.Errorf("only of IPv4: %s", got)
	}
	if _, some := none.SNATOf(false).Of(netip.MustParseAddr(pool)); some {
		t.Error("an address that the node does not have")
	}
}

func TestSourcesThatConnectionsMayHaveLeftFrom(t *testing.T) {
	const pool, other, partner, world = "10.244.8.2", "10.9.9.9", "203.0.113.9", "192.0.2.99"
	const all = "198.51.100.8 198.51.100.30 198.51.100.40 198.51.100.50"
	for _, tt := range []struct {
		has, src, dst, from string
		want                bool
		temporary           string // that the node has, and that SNAT never uses
	}{
		{"192.0.2.1", pool, world, "198.51.100.51", true, "198.51.100.51"},
		{"192.0.2.1", pool, world, "198.51.100.51", false, ""},
		{"198.51.100.50", other, world, "198.51.100.51", true, "198.51.100.51"},
		{"198.51.100.50", other, world, "198.51.100.51", false, ""},
		{"198.51.100.50", pool, world, "198.51.100.51", false, "198.51.100.51"}, // the entry has another one
		{all, other, world, "198.51.100.51", false, "198.51.100.51"},            // so has snatAddresses
		{all, pool, partner, "198.51.100.30", true, ""},
		{all, pool, world, "198.51.100.30", false, ""},
		{all, pool, partner, "198.51.100.40", false, ""}, // the entry before has no interface
		{all, pool, world, "198.51.100.40", true, ""},
		{all, pool, world, "198.51.100.50", true, ""},
		{all, pool, world, "198.51.100.51", false, ""},
		{all, pool, world, "198.51.100.8", false, ""},
		{all, other, world, "198.51.100.8", true, ""},
		{all, other, world, "198.51.100.9", false, ""},
		{all, other, world, "192.0.2.1", false, ""},
		{"192.0.2.1", other, world, "192.0.2.1", true, ""},
		{"192.0.2.1", other, world, "198.51.100.8", false, ""},
		{"192.0.2.1", other, world, "198.51.100.30", false, ""},
		{"198.51.100.30", other, world, "198.51.100.30", true, ""}, // by masquerading
		{"198.51.100.50", pool, partner, "198.51.100.50", true, ""},
		{"198.51.100.50", pool, partner, "192.0.2.1", false, ""},
	} {
		got := snatPolicy(tt.has).Families[0].AllowsSource(
			netip.MustParseAddr(tt.src), netip.MustParseAddr(tt.dst), netip.MustParseAddr(tt.from),
			slices.Contains(strings.Fields(tt.has+" "+tt.temporary), tt.from))
		if got != tt.want {
			t.Errorf("with %s, %s to %s from %s: %t", tt.has, tt.src, tt.dst, tt.from, got)
		}
	}
}

func TestEntriesThatCoverLaterOnes(t *testing.T) {
	list := func(text string) nft.List { return nft.NewList(cases.CIDRs(strings.Fields(text)...)) }
	ruleOf := func(from, to, out string) nft.SNATRule {
		r := nft.SNATRule{From: list(from), To: list(to)}
		for name := range strings.FieldsSeq(out) {
			r.Out = append(r.Out, config.Interface{Name: name})
		}
		return r
	}
	for _, tt := range []struct {
		a, b [3]string
		want bool
	}{
		{[3]string{"10.0.0.0/8"}, [3]string{"10.1.0.0/16"}, true},
		{[3]string{"10.1.0.0/16"}, [3]string{"10.0.0.0/8"}, false},
		{[3]string{"10.0.0.0/9 10.128.0.0/9"}, [3]string{"10.0.0.0/8"}, true},
		{[3]string{"10.0.0.0/8"}, [3]string{""}, false},
		{[3]string{"", "10.0.0.0/8"}, [3]string{"10.1.0.0/16"}, false},
		{[3]string{"", "10.0.0.0/8"}, [3]string{"11.1.0.0/16", "10.1.0.0/16"}, true},
		{[3]string{"10.0.0.0/8", "10.0.0.0/8"}, [3]string{"11.1.0.0/16", "10.1.0.0/16"}, false},
		{[3]string{"", "", "eth*"}, [3]string{"", "", "eth0 eth1"}, true},
		{[3]string{"", "", "eth*"}, [3]string{"", "", "eth0 wan0"}, false},
		{[3]string{"", "", "eth*"}, [3]string{"", "10.0.0.0/8", ""}, false},
		{[3]string{"10.0.0.0/8", "", ""}, [3]string{"10.0.0.0/8", "10.0.0.0/8", "eth0"}, true},
	} {
		a, b := ruleOf(tt.a[0], tt.a[1], tt.a[2]), ruleOf(tt.b[0], tt.b[1], tt.b[2])
		if _, got := b.CoveredBy([]nft.SNATRule{a}); got != tt.want {
			t.Errorf("%q covers %q: %t", tt.a, tt.b, got)
		}
	}
	for _, tt := range []struct {
		earlier [][3]string
		want    int // the place of the first that covers it, 0: none, also if several do together
	}{
		{[][3]string{{"10.0.0.0/9"}, {"10.128.0.0/9"}}, 0},
		{[][3]string{{"10.0.0.0/9"}, {"10.0.0.0/8"}, {""}}, 2},
	} {
		var earlier []nft.SNATRule
		for i, a := range tt.earlier {
			earlier = append(earlier, ruleOf(a[0], a[1], a[2]))
			earlier[i].Place = i + 1
		}
		if by, got := ruleOf("10.0.0.0/8", "10.0.0.0/8", "").CoveredBy(earlier); by.Place != tt.want || got != (tt.want > 0) {
			t.Errorf("%q: covered by %v, %t", tt.earlier, by, got)
		}
	}
	r := ruleOf("10.0.0.0/8 11.0.0.0/8", "192.0.2.0/24", "wan0 wg*")
	r.List = list("198.51.100.8/32")
	const want = "from 10.0.0.0/8, 11.0.0.0/8 to 192.0.2.0/24 leaves from 198.51.100.8 by wan0, wg*"
	if got := r.String(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := ruleOf("", "", "wan0").String(); got != "by wan0" {
		t.Error(got)
	}
}
