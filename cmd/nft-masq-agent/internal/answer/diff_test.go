package answer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfttest"
)

func TestDiffNamesEntriesByKey(t *testing.T) {
	for _, tt := range []struct {
		name, before, after string
		want                string // the text, without the hashes
	}{
		{"nothing", "nonMasqueradeCIDRs: [10.0.0.0/8]", "nonMasqueradeCIDRs: [10.0.0.0/8, 10.1.0.0/16]", "no change"},
		{
			"another order", "nonMasqueradeCIDRs: [10.0.0.0/8, 172.16.0.0/12]", "nonMasqueradeCIDRs: [172.16.0.0/12, " +
				"10.0.0.0/8]",
			"no change",
		},
		{
			"entries of a list", "nonMasqueradeCIDRs: [10.0.0.0/8]", "nonMasqueradeCIDRs: [10.0.0.0/9, 172.16.0.0/12]",
			"nonMasqueradeCIDRs: added 10.0.0.0/9\nnonMasqueradeCIDRs: added 172.16.0.0/12\n" +
				"nonMasqueradeCIDRs: removed 10.0.0.0/8",
		},
		{
			"a list that goes", "nonMasqueradeCIDRs: [10.0.0.0/8]\nmasqueradeSrcCIDRs: [10.244.0.0/16]",
			"nonMasqueradeCIDRs: [10.0.0.0/8]", "masqueradeSrcCIDRs: removed 10.244.0.0/16",
		},
		{"link-local", "masqLinkLocal: false", "masqLinkLocal: true", "nonMasqueradeCIDRs: removed 169.254.0.0/16"},
		{"the node", "masqueradeHost: true", "masqueradeHost: false", "masqueradeHost: added false"},
		{
			"interfaces, once for both families", "enableIPv6: true\nmasqueradeOutInterfaces: [eth0]",
			"enableIPv6: true\nmasqueradeOutInterfaces: [\"eth*\"]",
			"masqueradeOutInterfaces: added eth*\nmasqueradeOutInterfaces: removed eth0",
		},
		{"IPv6", "enableIPv6: false", "enableIPv6: true", "enableIPv6: false → true\nnonMasqueradeCIDRs: added fe80::/10"},
		{"values", "dropInvalid: false", "masqueradeSrcCIDRs: [10.244.0.0/16]\ndropInvalid: true\nenforceNonMasquerade: " +
			"true\n" +
			"toPorts: 2000-2999", "dropInvalid: false → true\nenforceNonMasquerade: added true, except for marks []\n" +
			"masqueradeSrcCIDRs: added 10.244.0.0/16\nsource ports: kept if free → kept if free; tcp, udp, sctp: 2000-2999"},
		{
			"snatAddresses", "snatAddresses: [192.0.2.7]", "snatAddresses: [192.0.2.8]",
			"snatAddresses: added 192.0.2.8\nsnatAddresses: removed 192.0.2.7",
		},
		{
			"snatRules", "snatRules: [{from: [10.1.0.0/16], addresses: [192.0.2.7]}, {from: [10.2.0.0/16], addresses: " +
				"[192.0.2.7]}]",
			"snatRules: [{from: [10.2.0.0/16], addresses: [192.0.2.7]}, {from: [10.1.0.0/16], addresses: [192.0.2.7]}, " +
				"{to: [10.3.0.0/16], out: [eth1], addresses: [192.0.2.8]}]",
			"snatRules: added to 10.3.0.0/16 leaves from 192.0.2.8 by eth1\n" +
				"snatRules: moved entry 2 to 1: from 10.2.0.0/16 leaves from 192.0.2.7\n" +
				"snatRules: moved entry 1 to 2: from 10.1.0.0/16 leaves from 192.0.2.7",
		},
		{
			"snatRules without the first one", "snatRules: [{from: [10.1.0.0/16], addresses: [192.0.2.7]}, " +
				"{from: [10.2.0.0/16], addresses: [192.0.2.7]}, {from: [10.3.0.0/16], addresses: [192.0.2.7]}]",
			"snatRules: [{from: [10.3.0.0/16], addresses: [192.0.2.7]}, {from: [10.2.0.0/16], addresses: [192.0.2.7]}]",
			"snatRules: removed from 10.1.0.0/16 leaves from 192.0.2.7\n" +
				"snatRules: moved entry 3 to 1: from 10.3.0.0/16 leaves from 192.0.2.7",
		},
		{
			"snatRules of both families", "enableIPv6: true\nsnatRules: [{to: [2001:db8::/32], addresses: [2001:db8::7]}, " +
				"{from: [10.2.0.0/16], addresses: [192.0.2.7]}, {from: [10.3.0.0/16], addresses: [192.0.2.7]}]",
			"enableIPv6: true\nsnatRules: [{from: [10.3.0.0/16], addresses: [192.0.2.7]}, " +
				"{from: [10.2.0.0/16], addresses: [192.0.2.7]}, {to: [2001:db8::/32], addresses: [2001:db8::7]}]",
			"snatRules: moved entry 3 to 1: from 10.3.0.0/16 leaves from 192.0.2.7\n" +
				"snatRules: moved entry 1 to 3: to 2001:db8::/32 leaves from 2001:db8::7",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := NewDiff(testPolicy(t, tt.before), testPolicy(t, tt.after))
			lines := strings.Split(strings.TrimSpace(text(t, &d)), "\n")
			got := strings.Join(lines[:len(lines)-1], "\n")
			nfttest.Same(t, "(-want +got)", tt.want, got)
			if d.HasChanges() != (tt.want != "no change") || d.HasChanges() != (d.Before.Hash != d.After.Hash) {
				t.Errorf("changed %t, hashes %s and %s", d.HasChanges(), d.Before.Hash, d.After.Hash)
			}
		})
	}
}

func TestDiffKnowsThatAFamilyThatIsOffIsExempt(t *testing.T) {
	off := conntrack.NewComparison(testPolicy(t, "enableIPv6: false"), &conntrack.Node{})
	on := conntrack.NewComparison(testPolicy(t, "enableIPv6: true"), &conntrack.Node{})
	src := netip.MustParseAddrPort("[fd00::2]:4000")
	dst := netip.MustParseAddrPort("[2001:db8:9::1]:443")
	e := conntrack.Entry{Key: conntrack.Key{
		Original: conntrack.Tuple{Src: src, Dst: dst}, Reply: conntrack.Tuple{Src: dst, Dst: src},
	}}
	for _, tt := range []struct {
		old, current *conntrack.Comparison
		want         []string
	}{
		{off, off, nil},
		{off, on, []string{"exempt → masqueraded by anything else"}},
		{on, off, []string{"masqueraded → exempt by enableIPv6"}},
	} {
		count := NewRetranslations(tt.old, tt.current)
		count.Add(&e)
		var got []string
		for _, c := range count.List() {
			got = append(got, fmt.Sprintf("%s → %s by %s", c.Before, c.After, c.Entry))
		}
		if count.Unjudged > 0 || !slices.Equal(got, tt.want) {
			t.Errorf("%d are not judged, %q; want %q", count.Unjudged, got, tt.want)
		}
	}
}

func TestDiffCountsConnectionsThatLeaveFromAnotherAddress(t *testing.T) {
	before := conntrack.NewComparison(testPolicy(t, "snatAddresses: [198.51.100.7]", "198.51.100.7"), &conntrack.Node{})
	after := conntrack.NewComparison(testPolicy(t, "snatAddresses: [198.51.100.8]", "198.51.100.8"), &conntrack.Node{})
	e := exampleOf("198.51.100.7", "").Entry
	for _, tt := range []struct {
		old, current *conntrack.Comparison
		want         string
	}{
		{before, before, ""},
		{after, before, ""}, // it agrees with the new one
		{before, after, "1 open connection: masqueraded from another address than new ones, by anything else, such as tcp " +
			"10.244.1.7:40000 to 203.0.113.9:443"},
	} {
		count := NewRetranslations(tt.old, tt.current)
		count.Add(&e)
		got := ""
		for _, c := range count.List() {
			got += c.String()
		}
		if got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

// Connections that the new policy translates otherwise are counted by the entry that decides then.
func TestDiffCountsConnectionsByTheEntryThatWouldDecide(t *testing.T) {
	count := NewRetranslations(
		conntrack.NewComparison(testPolicy(t, "nonMasqueradeCIDRs: [10.0.0.0/8]"), &conntrack.Node{}),
		conntrack.NewComparison(testPolicy(t, "nonMasqueradeCIDRs: [203.0.113.0/24]"), &conntrack.Node{}))
	for _, c := range []struct {
		dst, seen string
		times     int
	}{{"203.0.113.9", "192.0.2.1", 4}, {"10.9.0.9", "10.244.1.7", 2}, {"198.51.100.1", "192.0.2.1", 3}} {
		for i := range c.times {
			var e conntrack.Entry
			src := netip.AddrPortFrom(netip.MustParseAddr("10.244.1.7"), uint16(4000+i))
			dst := netip.AddrPortFrom(netip.MustParseAddr(c.dst), 443)
			e.Original = conntrack.Tuple{Src: src, Dst: dst, Protocol: unix.IPPROTO_UDP}
			e.Reply = conntrack.Tuple{
				Src: dst, Dst: netip.AddrPortFrom(netip.MustParseAddr(c.seen), src.Port()), Protocol: unix.IPPROTO_UDP,
			}
			count.Add(&e)
		}
	}
	closed := conntrack.Entry{State: "TIME_WAIT"}
	count.Add(&closed)
	inZone := conntrack.Entry{Zone: 7}
	count.Add(&inZone)
	if count.Unjudged != 1 {
		t.Errorf("%d are not judged, want the one in a zone", count.Unjudged)
	}
	plain := conntrack.NewComparison(testPolicy(t, "nonMasqueradeCIDRs: [203.0.113.0/24]"), &conntrack.Node{})
	leaving := conntrack.NewComparison(testPolicy(t, "masqueradeOutInterfaces: [eth0]"), &conntrack.Node{})
	for _, policies := range [][2]*conntrack.Comparison{{plain, leaving}, {leaving, plain}} {
		e := exampleOf("192.0.2.1", "").Entry
		depends := NewRetranslations(policies[0], policies[1])
		depends.Add(&e)
		if depends.Unjudged != 1 || len(depends.List()) > 0 {
			t.Errorf("by an interface that is not known: %d are not judged, %v", depends.Unjudged, depends.List())
		}
	}
	var got []string
	for _, c := range count.List() {
		got = append(got, c.String())
	}
	want := []string{
		"4 open connections: masqueraded → exempt, by nonMasqueradeCIDRs 203.0.113.0/24, such as udp 10.244.1.7:4000 to " +
			"203.0.113.9:443, udp 10.244.1.7:4001 to 203.0.113.9:443, udp 10.244.1.7:4002 to 203.0.113.9:443",
		"2 open connections: exempt → masqueraded, by anything else, such as udp 10.244.1.7:4000 to 10.9.0.9:443, " +
			"udp 10.244.1.7:4001 to 10.9.0.9:443",
	}
	nfttest.Same(t, "(-want +got)", want, got)
}
