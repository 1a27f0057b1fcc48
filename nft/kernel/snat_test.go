package kernel

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// fixed is a ruleset with fixed source addresses on a node with some of them.
func fixed(node ...string) nft.Ruleset { return ruled(nil, node...) }

// ruled is fixed with snatRules.
func ruled(rules []config.SNATRule, node ...string) nft.Ruleset {
	c := config.Default(config.Defaults{EnableIPv6: true})
	c.SNATRules = rules
	c.SNATAddresses = cases.CIDRs("198.51.100.208/29", "2001:db8:5::/64")
	var addresses []netip.Addr
	for _, a := range node {
		addresses = append(addresses, netip.MustParseAddr(a))
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}).On(addresses)
}

func TestTamperedSourceAddressesAreFoundAndRestored(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	want := ruled([]config.SNATRule{
		{From: cases.CIDRs("10.244.8.0/24"), Addresses: cases.CIDRs("198.51.100.211/32")},
		{From: cases.CIDRs("10.244.0.0/16", "fd00:8::/64"), Addresses: cases.CIDRs("198.51.100.212/32", "2001:db8:5::2/128")},
		{To: cases.CIDRs("203.0.113.0/24"), Addresses: cases.CIDRs("198.51.100.211/32")},
	}, "198.51.100.211", "198.51.100.212", "2001:db8:5::2")
	other := map[string]string{"198.51.100.211": "198.51.100.212", "198.51.100.212": "198.51.100.211"}
	seventh, _ := want.Policy.SNATOf(false).Of(netip.MustParseAddr("10.0.0.7"))
	apply(t, k, want, everything)
	const table = "inet nft-masq-agent "
	for _, tt := range []struct{ name, do, finds string }{
		{"an element is missing", "delete element " + table + "MAP { 0.0.0.7 }", "lacks 0.0.0.7 : " + seventh.String()},
		{
			"an element has another address", "delete element " + table + "MAP { 0.0.0.7 }; add element " + table +
				"MAP { 0.0.0.7 : OTHER }",
			"has 0.0.0.7 : OTHER instead of " + seventh.String(),
		},
		{"an element has an address that the node does not have", "delete element " + table +
			"MAP { 0.0.0.7 }; add element " + table + "MAP { 0.0.0.7 : 203.0.113.9 }", "203.0.113.9 instead of"},
		{
			"there is one more", "add element " + table + "MAP { 10.0.0.7 : 203.0.113.9 }",
			"10.0.0.7 : 203.0.113.9, which is not in the config",
		},
		{"all elements are missing", "flush map " + table + "MAP", "246 more elements are wrong"},
		{"the list of the config is changed", "add element " + table + "LIST { 203.0.113.9 }", "contains 203.0.113.9"},
		{
			"the chain is empty", "flush chain " + table + "snat-v4",
			"chain snat-v4: missing rule: snat ip to ip saddr & 0.0.0.255 map @snat-by-pod-v4-a",
		},
		{
			"another address", "flush chain " + table + "snat-v6; add rule " + table + "snat-v6 snat ip6 to 2001:db8::9",
			"snat ip6 to 2001:db8::9",
		},
		{
			"a source of snatRules is missing", "delete element " + table + "SOURCES { 10.244.8.0/24 }",
			"SOURCES lacks 10.244.8.0/24",
		},
		{
			"a source of snatRules is another one", "delete element " + table + "SIXTH { fd00:8::/64 }; " +
				"add element " + table + "SIXTH { fd00:8::/65 }",
			"SIXTH contains fd00:8::/65 instead of fd00:8::/64",
		},
		{
			"a destination of snatRules is added", "add element " + table + "RULETO { 192.0.2.0/24 }",
			"RULETO contains 192.0.2.0/24, which is not in the config",
		},
		{"all destinations of snatRules are missing", "flush set " + table + "RULETO", "RULETO lacks"},
		{
			"the chain of an entry is empty", "flush chain " + table + "snat-rule-2-v4",
			"chain snat-rule-2-v4: missing rule: snat ip to 198.51.100.212",
		},
		{
			"the chain of an entry is missing",
			"flush chain " + table + "snat-v4; delete chain " + table + "snat-rule-3-v4",
			"chain snat-rule-3-v4 is missing",
		},
	} {
		sets := nfttest.NFT(t, ns, "", "list", "table", "inet", nft.TableName)
		names := []string{"OTHER", other[seventh.String()]}
		for word, set := range map[string]string{
			"MAP": "snat-by-pod-v4", "LIST": "snat-v4", "SOURCES": "snat-rule-1-from-v4", "SIXTH": "snat-rule-2-from-v6",
			"RULETO": "snat-rule-3-to-v4",
		} {
			side := "-a"
			if strings.Contains(sets, " "+set+"-b {") {
				side = "-b"
			}
			names = append(names, word, set+side)
		}
		fill := strings.NewReplacer(names...)
		nfttest.NFT(t, ns, fill.Replace(tt.do), "-f", "-")
		finds := fill.Replace(tt.finds)
		if diffs := strings.Join(apply(t, k, want, layout.Ours), "\n"); !strings.Contains(diffs, finds) {
			t.Errorf("%s: %q is not in %q", tt.name, finds, diffs)
		}
		inSync(t, ns, want)
	}
}

// If an address is added or removed, only the map changes, or the rule for a single address.
func TestChangeOfAddressesKeepsTheOtherSets(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	handles := func() map[string]uint64 {
		t.Helper()
		sets, err := connect(t, ns).Sets(1, nft.TableName)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]uint64{}
		for _, s := range sets {
			if !strings.HasPrefix(s.Name, "snat-by-pod") {
				all[s.Name] = s.Handle
			}
		}
		return all
	}
	apply(t, k, fixed(), everything)
	before := handles()
	for _, node := range [][]string{
		{"198.51.100.211"},
		{"198.51.100.211", "198.51.100.212"},
		{"198.51.100.213", "198.51.100.212"},
		{"198.51.100.213"},
		{"2001:db8:5::2", "2001:db8:5::3"},
		{},
	} {
		want := fixed(node...)
		if diffs := apply(t, k, want, layout.Ours); len(diffs) == 0 {
			t.Errorf("%v: nothing was written", node)
		}
		inSync(t, ns, want)
		if diff := cmp.Diff(before, handles()); diff != "" {
			t.Errorf("%v: sets (-before +after):\n%s", node, diff)
		}
		if got, found, err := open(t, ns).Installed(t.Context()); err != nil || !found || got.Hash != want.Hash() {
			t.Errorf("%v: installed are %+v, %t, %v", node, got, found, err)
		}
	}
}

// The most entries with port ranges are more rules than are read of another program's.
func TestMostEntriesAreInSyncOnceApplied(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	c := config.Default(config.Defaults{EnableIPv6: true})
	for i := range 64 {
		r := config.SNATRule{
			From:      cases.CIDRs(fmt.Sprintf("10.%d.0.0/16", i), fmt.Sprintf("fd00:%x::/32", i+1)),
			Addresses: cases.CIDRs("198.51.100.211/32", "2001:db8:5::/64"),
		}
		r.Out = []config.Interface{{Name: "eth1"}, {Name: "wan*"}}
		c.SNATRules = append(c.SNATRules, r)
	}
	o := nft.Options{Layout: native.Layout{}, RandomFully: true}
	for i := range uint16(4) {
		o.Ports = append(o.Ports, nft.PortRange{Min: 10_000 * (i + 1), Max: 10_000*(i+1) + 999})
	}
	k := open(t, ns)
	want := nft.Compile(c, o).On([]netip.Addr{netip.MustParseAddr("198.51.100.211"), netip.MustParseAddr("2001:db8:5::2")})
	apply(t, k, want, everything)
	inSync(t, ns, want)
	want = want.On(nil)
	apply(t, k, want, everything)
	inSync(t, ns, want)
}

// Each combination of from, to and out, with one address and with several, decides about
// real packets of each protocol. Entries that fail in one of the conditions are before it.
func TestEntriesDecideAboutPacketsOfEachProtocol(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	wire := newWire(t)
	k := open(t, wire.Node)
	type ends struct{ pod, dst string }
	const from, to, out = 1, 2, 4
	for which := 1; which <= from|to|out; which++ {
		entry := func(fails int, addresses ...string) config.SNATRule {
			r := config.SNATRule{Addresses: cases.CIDRs(addresses...)}
			if which&from != 0 {
				r.From = cases.CIDRs("10.244.1.0/24", "fd00:10:244:1::/64")
			}
			if which&to != 0 {
				r.To = cases.CIDRs("203.0.113.0/25", "2001:db8:77::/64")
			}
			if which&out != 0 {
				r.Out = []config.Interface{{Name: "wan*"}, {Name: "eth*"}}
			}
			switch fails {
			case from:
				r.From = cases.CIDRs("10.244.9.0/24", "fd00:10:244:9::/64")
			case to:
				r.To = cases.CIDRs("203.0.113.128/25", "2001:db8:78::/64")
			case out:
				r.Out = []config.Interface{{Name: "wan0"}, {Name: "eth"}}
			}
			return r
		}
		for _, addresses := range [][]string{
			{"198.51.100.211/32", "2001:db8:5::2/128"},
			{"198.51.100.211/32", "198.51.100.212/32", "198.51.100.225/32", "2001:db8:5::2/128", "2001:db8:5::3/128"},
		} {
			c := config.Default(config.Defaults{EnableIPv6: true})
			for _, fails := range []int{from, to, out} {
				if which&fails != 0 {
					c.SNATRules = append(c.SNATRules, entry(fails, "198.51.100.226/32", "2001:db8:5::4/128"))
				}
			}
			c.SNATRules = append(c.SNATRules, entry(0, addresses...))
			var node []netip.Addr
			for _, a := range cases.SNATAddresses() {
				node = append(node, netip.MustParseAddr(a))
			}
			r := nft.Compile(c, nft.Options{Layout: native.Layout{}, RandomFully: true}).On(node)
			apply(t, k, r, layout.Ours)
			for _, e := range []ends{
				{"10.244.1.2", "203.0.113.9"},
				{"10.244.1.7", "203.0.113.9"},
				{"10.244.9.2", "203.0.113.9"},
				{"10.244.1.2", "203.0.113.200"},
				{"fd00:10:244:1::2", "2001:db8:77::9"},
				{"fd00:10:244:1::7", "2001:db8:77::9"},
				{"fd00:10:244:9::2", "2001:db8:77::9"},
				{"fd00:10:244:1::2", "2001:db8:78::9"},
			} {
				for _, proto := range []nfttest.Proto{nfttest.TCP, nfttest.UDP, nfttest.SCTP, nfttest.ICMP} {
					p := cases.Packet{
						Src: netip.MustParseAddr(e.pod), Dst: netip.MustParseAddr(e.dst), Proto: proto,
						Verdict: nft.Masqueraded,
						Line:    fmt.Sprintf("%v: %s %s %s", c.SNATRules, e.pod, e.dst, proto),
					}
					p.Seen = cases.SpecifiedSources(c, p.Connection(), node)
					wire.check(t, k, r, p)
				}
			}
		}
	}
}
