package judge_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

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
	return nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs(strings.Fields(has)...))
}

// TestPolicyMatchesTheSpecification has the sources themselves.
func TestSourcesOfAPolicyAreCounted(t *testing.T) {
	const all = "198.51.100.9 198.51.100.8 198.51.100.30 198.51.100.40 198.51.100.51 198.51.100.50 2001:db8:6::1 " +
		"2001:db8:5::9 198.51.100.8 127.0.0.1 192.0.2.1"
	p, none := snatPolicy(all), snatPolicy("192.0.2.1")
	present, absent := p.CountSNATRules()
	if present != 4 || absent != 0 {
		t.Errorf("%d present, %d absent", present, absent)
	}
	if present, absent := none.CountSNATRules(); present != 0 || absent != 4 {
		t.Errorf("%d present, %d absent", present, absent)
	}
	if got := fmt.Sprint(p.Families[0].PresentAddresses(),
		p.Families[1].PresentAddresses()); got != "[198.51.100.8 198.51.100.9 198.51.100.30 "+
		"198.51.100.40 198.51.100.50 198.51.100.51] [2001:db8:5::9 2001:db8:6::1]" {
		t.Errorf("sources %s", got)
	}
	if !p.Families[0].HasPresentAddress() || none.Families[0].HasPresentAddress() {
		t.Error("the node has addresses, or not")
	}
	some, every := p.Families[0].SNATAddresses().Absent(), none.Families[0].SNATAddresses().Absent()
	if len(some) != 1 || len(every) != 2 {
		t.Errorf("%v and %v absent", some, every)
	}
	empty := nft.Policy{Families: make([]nft.FamilyPolicy, 2)}
	if len(p.Families[1].SNATAddresses().Absent()) != 0 || !p.HasSNAT() || empty.HasSNAT() {
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
	}, nft.Options{Layout: native.Layout{}}).WithAddresses(cases.Addrs("198.51.100.90", "198.51.100.30"))
	present, absent = four.CountSNATRules()
	got := fmt.Sprint(present, absent, four.Families[0].PresentAddresses())
	if got != "1 0 [198.51.100.30 198.51.100.90]" {
		t.Errorf("only of IPv4: %s", got)
	}
	a, entry := judge.SourceAddress(none, nft.Connection{
		Src: netip.MustParseAddr("10.244.8.2"), Dst: netip.MustParseAddr("203.0.113.9"),
	})
	if a.IsValid() {
		t.Errorf("an address that the node does not have, %s, by %v", a, entry)
	}
}

// The first entry for a connection of which the node has an address decides, if it is for all interfaces. Masquerading
// chooses others, if none does.
func TestAddressesThatAConnectionMayHaveLeftFrom(t *testing.T) {
	addresses := func(texts ...string) (r nft.SNATRule) {
		for _, text := range texts {
			a := netip.MustParseAddr(strings.TrimPrefix(text, "lost:"))
			r.Addresses.Written = append(r.Addresses.Written, config.CIDR{Prefix: netip.PrefixFrom(a, 32)})
			if !strings.HasPrefix(text, "lost:") {
				r.Present = append(r.Present, a)
			}
		}
		r.Addresses = nft.NewList(r.Addresses.Written)
		return r
	}
	some := addresses("198.51.100.8")
	some.Destinations = nft.NewList(cases.CIDRs("203.0.113.0/24"))
	wan := addresses("198.51.100.40")
	wan.Interfaces = []config.Interface{{Name: "wan0"}}
	all := addresses("198.51.100.50", "lost:198.51.100.51")
	gone := addresses("lost:198.51.100.60")
	const listed, elsewhere = "203.0.113.9", "198.18.0.9"
	for _, tt := range []struct {
		rules        []nft.SNATRule
		dst, address string
		onNode, want bool
	}{
		{[]nft.SNATRule{some, wan, all}, listed, "198.51.100.8", true, true},
		{[]nft.SNATRule{some, wan, all}, listed, "198.51.100.40", true, false},
		{[]nft.SNATRule{some, wan, all}, listed, "192.0.2.1", true, false},
		{[]nft.SNATRule{some, wan, all}, elsewhere, "198.51.100.8", true, false},
		{[]nft.SNATRule{some, wan, all}, elsewhere, "198.51.100.40", true, true},
		{[]nft.SNATRule{some, wan, all}, elsewhere, "198.51.100.50", true, true},
		{[]nft.SNATRule{some, wan, all}, elsewhere, "198.51.100.51", false, false},
		{[]nft.SNATRule{some, wan}, elsewhere, "198.51.100.8", true, true}, // masquerading may have chosen it
		{[]nft.SNATRule{some, wan}, elsewhere, "192.0.2.1", false, true},
		{[]nft.SNATRule{gone, wan}, elsewhere, "198.51.100.60", false, false},
		{[]nft.SNATRule{gone, wan}, elsewhere, "192.0.2.1", false, true},
		{[]nft.SNATRule{gone, all}, elsewhere, "198.51.100.50", true, true},
		{[]nft.SNATRule{gone}, elsewhere, "198.51.100.60", true, true},
	} {
		f := nft.FamilyPolicy{SNAT: tt.rules}
		src, dst, address := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr(tt.dst), netip.MustParseAddr(tt.address)
		if got := judge.AllowsSource(f, src, dst, address, tt.onNode); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
}

// The first packet that an entry is for is asked about: from the source, to its first destination, by its first
// interface.
func TestEntriesWithoutAnAddressAreMissingUnlessAnotherOneDecides(t *testing.T) {
	list := func(text string) nft.List { return nft.NewList(cases.CIDRs(strings.Fields(text)...)) }
	ruleOf := func(from, to, out string) nft.SNATRule {
		r := nft.SNATRule{Number: 1, Sources: list(from), Destinations: list(to)}
		for name := range strings.FieldsSeq(out) {
			r.Interfaces = append(r.Interfaces, config.Interface{Name: name})
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
		{[3]string{"10.0.0.0/8"}, [3]string{""}, true},
		{[3]string{"", "10.0.0.0/8"}, [3]string{"10.1.0.0/16"}, false},
		{[3]string{"", "10.0.0.0/8"}, [3]string{"11.1.0.0/16", "10.1.0.0/16"}, true},
		{[3]string{"10.0.0.0/8", "10.0.0.0/8"}, [3]string{"11.1.0.0/16", "10.1.0.0/16"}, false},
		{[3]string{"", "", "eth*"}, [3]string{"", "", "eth0 eth1"}, true},
		{[3]string{"", "", "eth*"}, [3]string{"", "", "wan0 eth0"}, false},
		{[3]string{"", "", "eth*"}, [3]string{"", "10.0.0.0/8", ""}, false},
		{[3]string{"10.0.0.0/8", "", ""}, [3]string{"10.0.0.0/8", "10.0.0.0/8", "eth0"}, true},
	} {
		a, b := ruleOf(tt.a[0], tt.a[1], tt.a[2]), ruleOf(tt.b[0], tt.b[1], tt.b[2])
		a.Present = []netip.Addr{netip.MustParseAddr("198.51.100.8")}
		src := netip.MustParseAddr("10.1.0.1")
		if len(b.Sources.CIDRs) > 0 {
			src = b.Sources.CIDRs[0].Addr()
		}
		p := nft.Policy{Families: []nft.FamilyPolicy{{SNAT: []nft.SNATRule{b, a}}}}
		if got := !judge.MissesAddress(p, b, src); got != tt.want {
			t.Errorf("%q decides instead of %q: %t", tt.a, tt.b, got)
		}
		if judge.MissesAddress(p, a, src) {
			t.Errorf("%q has an address", tt.a)
		}
	}
	six := ruleOf("", "2001:db8::/32", "")
	both := nft.Policy{Families: []nft.FamilyPolicy{{}, {IPv6: true, SNAT: []nft.SNATRule{six}}}}
	if judge.MissesAddress(both, six, netip.MustParseAddr("10.1.0.1")) ||
		!judge.MissesAddress(both, six, netip.MustParseAddr("fd00::2")) {
		t.Error("an entry with a destination of IPv6 is for sources of IPv6")
	}
	r := ruleOf("10.0.0.0/8 11.0.0.0/8", "192.0.2.0/24", "wan0 wg*")
	r.Addresses = list("198.51.100.8/32")
	const want = "from 10.0.0.0/8, 11.0.0.0/8 to 192.0.2.0/24 leaves from 198.51.100.8 by wan0, wg*"
	if got := r.String(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := ruleOf("", "", "wan0").String(); got != "by wan0" {
		t.Error(got)
	}
}
