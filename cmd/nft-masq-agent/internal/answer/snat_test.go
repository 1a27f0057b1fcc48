package answer

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// For random policies, explain has the verdict that is specified, with CIDRs that have the address, and
// names the address that is specified, the entry that decides, and those that it passes because the
// node has no address of them.
func TestExplanationHasTheSpecifiedVerdictAndAddress(t *testing.T) {
	m := cases.NewMaker(5)
	byRule, passed := 0, 0
	verdicts := map[nft.Verdict]int{}
	for range nfttest.Rounds(500, 1_000, 10_000) {
		c, node := m.Config(), m.Addresses()
		p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(node)
		for range 10 {
			ipv6 := c.EnableIPv6 && m.IntN(2) == 0
			conn := m.Connection(m.Near(c, ipv6), m.Near(c, ipv6))
			var x Explanation
			x.add(p, conn)
			a, possible := x.Answers[0], cases.SpecifiedSources(c, conn, node)
			want := cases.Specified(c, conn)
			if verdicts[want]++; a.Verdict != want {
				t.Fatalf("%+v: %s, want %s: config %+v", conn, a.Verdict, want, c)
			}
			for _, s := range a.Steps {
				asked := conn.Dst
				if strings.HasPrefix(s.Question, "source") {
					asked = conn.Src
				}
				if s.CIDR != "" && !netip.MustParsePrefix(s.CIDR).Contains(asked) {
					t.Fatalf("%s is not in %s", asked, s.CIDR)
				}
			}
			if cases.Specified(c, conn) != nft.Masqueraded {
				possible = nil
			}
			first, _, _ := strings.Cut(a.sees, ",")
			named, err := netip.ParseAddr(first)
			if (err == nil) != (len(possible) > 0) || err == nil && !slices.Contains(possible, named) {
				t.Fatalf("%+v: %q, want one of %v: config %+v on a node with %v", conn, a.sees, possible, c, node)
			}
			of := func(id string) config.Problems {
				return slices.DeleteFunc(slices.Clone(x.Notes), func(n config.Problem) bool { return n.ID != id })
			}
			if _, entry, by := strings.Cut(a.sees, "by entry "); by {
				byRule++
				name := "entry " + strings.Fields(entry)[0] + " of snatRules"
				if n := of("snat-rule"); len(n) != 1 || !strings.Contains(n[0].Msg, name) {
					t.Fatalf("%q, decided by %v", a.sees, n)
				}
			}
			passed += len(of("snat-rule-absent"))
		}
	}
	if byRule < 100 || passed < 25 || len(verdicts) != 3 {
		t.Errorf("%d were decided by an entry, %d passed one; %v", byRule, passed, verdicts)
	}
}

func TestLintFindsEntriesThatNeverMatch(t *testing.T) {
	entry := func(from, to, out string) (r config.SNATRule) {
		r.Addresses = cases.CIDRs("198.51.100.11/32")
		r.From, r.To, r.Out = cases.CIDRs(strings.Fields(from)...), cases.CIDRs(strings.Fields(to)...),
			names(strings.Fields(out)...)
		return r
	}
	for _, tt := range []struct {
		name    string
		entries []config.SNATRule
		want    string // the end of the warning
	}{
		{"others", []config.SNATRule{entry("10.1.0.0/16", "", ""), entry("10.0.0.0/8", "", "")}, ""},
		{
			"one",
			[]config.SNATRule{entry("10.0.0.0/8", "", ""), entry("10.1.0.0/16", "203.0.113.0/24", "eth0")},
			"of entry 1: ",
		},
		{"any interface", []config.SNATRule{entry("", "", "eth*"), entry("10.1.0.0/16", "", "eth0 eth1")}, "of entry 1: "},
		{"another interface", []config.SNATRule{entry("", "", "eth*"), entry("10.1.0.0/16", "", "eth0 wan0")}, ""},
		{"fewer", []config.SNATRule{entry("10.1.0.0/16", "203.0.113.0/24", ""), entry("10.1.0.0/16", "", "")}, ""},
		{
			"several",
			[]config.SNATRule{
				entry("10.0.0.0/9", "", ""), entry("10.1.0.0/16", "", ""), entry("10.128.0.0/9", "", "eth0"),
				entry("10.0.0.0/8", "", "eth0"),
			},
			"",
		},
		{
			"several destinations",
			[]config.SNATRule{
				entry("", "203.0.112.0/24", ""), entry("", "203.0.113.0/24", ""),
				entry("10.0.0.0/8", "203.0.112.0/23", ""),
			},
			"",
		},
		{
			"not all of it",
			[]config.SNATRule{
				entry("10.0.0.0/9", "", ""), entry("10.128.0.0/9", "203.0.113.0/24", ""),
				entry("10.0.0.0/8", "", ""),
			},
			"",
		},
	} {
		c := config.Default(config.Defaults{})
		c.SNATRules = tt.entries
		got := ""
		for _, f := range Lint(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), nil) {
			if f.ID == "snat-rule-covered" &&
				strings.Contains(f.Msg, "entry "+string(rune('0'+len(tt.entries)))+" never matches") {
				got = f.Msg
			}
		}
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestStatusNamesEntriesWithoutAnAddressOfTheNode(t *testing.T) {
	const rules = "snatRules: [{from: [10.244.8.0/24], addresses: [198.51.100.21]}, {out: [eth1], addresses: " +
		"[198.51.100.22]}]\n"
	const list = "snatAddresses: [198.51.100.11, 198.51.100.64/29]\n"
	for _, tt := range []struct{ file, node, want string }{
		{rules, "198.51.100.22", "IPv4 connections of pods for which an entry of snatRules matches leave from its " +
			"address. This node has no address of these entries of snatRules: 1 (config:1:13)."},
		{
			rules, "198.51.100.21 198.51.100.22",
			"IPv4 connections of pods for which an entry of snatRules matches leave from " + "its address.",
		},
		{list, "198.51.100.65", "IPv4 connections of pods leave from 198.51.100.65; not on this node: 198.51.100.11"},
		{list + rules, "198.51.100.11 198.51.100.65 198.51.100.21", "IPv4 connections of pods leave from 198.51.100.11, " +
			"198.51.100.65; this node has no address of these entries of snatRules: 2 (config:2:66)"},
		{list + rules, "", "This node has none of the IPv4 snatAddresses: connections are masqueraded with the address of " +
			"the interface. This node has no address of these entries of snatRules: 1 (config:2:13), 2 (config:2:66)."},
	} {
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(tt.file)})
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		var node []netip.Addr
		for _, a := range strings.Fields(tt.node) {
			node = append(node, netip.MustParseAddr(a))
		}
		got := NodeSNAT(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(node))
		if len(got) != 1 || got[0].String() != tt.want {
			t.Errorf("%v, want %q", got, tt.want)
		}
	}
}
