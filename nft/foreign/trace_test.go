package foreign_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfttest"
)

// A map can choose the address by the source; a source without an entry is not
// translated.
func TestTraceFollowsAddressMaps(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table inet t {
		map m4 { type ipv4_addr : ipv4_addr; elements = { 0.0.0.1 : 198.51.100.11, 0.0.0.2 : 198.51.100.12, 0.0.0.3 : 198.51.100.11 }; }
		map m6 { type ipv6_addr : ipv6_addr; elements = { ::1 : 2001:db8::11 }; }
		map all6 { type ipv6_addr : ipv6_addr; elements = { ::0 : 2001:db8::13, ::1 : 2001:db8::12 }; }
		chain sub {
			meta l4proto tcp numgen random mod 2 < 1 snat ip to ip saddr & 0.0.0.255 map @m4:1024-2047
			meta nfproto ipv4 snat ip to ip saddr & 0.0.0.255 map @m4 fully-random
			ip6 daddr 2001:db8::7 snat ip6 to ip6 saddr & ::1 map @all6
			snat ip6 to ip6 saddr & ::ff map @m6
			masquerade
		}
		chain post { type nat hook postrouting priority 110; jump sub; }
	}`, "-f", "-")
	tracer, err := foreign.NewTracer(t.Context(), c, notOwn)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ src, dst, want string }{
		{"10.244.1.1", "203.0.113.9", "198.51.100.11"},
		{"10.244.7.2", "203.0.113.9", "198.51.100.12"},
		{"10.244.1.3", "203.0.113.9", "198.51.100.11"},
		{"10.244.1.4", "203.0.113.9", "masquerade"},
		{"fd00::1", "2001:db8::9", "2001:db8::11"},
		{"fd00::2", "2001:db8::9", "masquerade"},
		{"", "203.0.113.9", "masquerade"},                  // perhaps
		{"", "2001:db8::9", "masquerade"},                  // perhaps
		{"", "2001:db8::7", "[2001:db8::12 2001:db8::13]"}, // certainly: every source has an entry
	} {
		p := foreign.Packet{Dst: netip.MustParseAddr(tt.dst), SrcType: unix.RTN_UNICAST, DstType: unix.RTN_UNICAST}
		if tt.src != "" {
			p.Src = netip.MustParseAddr(tt.src)
		}
		trace := tracer.TraceAt(p, unix.NF_INET_POST_ROUTING)
		last := trace.Ways[len(trace.Ways)-1]
		got := fmt.Sprint(last.Among)
		switch {
		case last.Masquerade:
			got = "masquerade"
		case last.To.From.IsValid():
			got = last.To.From.String()
		}
		if got != tt.want || trace.Through || last.Keeps {
			t.Errorf("from %q to %s: %s, want %s: %+v", tt.src, tt.dst, got, tt.want, trace)
		}
		if tt.src == "10.244.1.1" && (len(trace.Ways) != 2 ||
			!strings.Contains(trace.Ways[0].RuleText(), "map @m4:1024-2047")) {
			t.Errorf("ways %+v", trace.Ways)
		}
	}
}
