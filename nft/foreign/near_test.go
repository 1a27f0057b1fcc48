package foreign_test

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfttest"
)

// A chain, a set or a map that would exceed a bound is not read, and may do anything.
func TestReadingEndsAtItsBounds(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip t {
		set s { type ipv4_addr; elements = { 10.0.0.1, 10.0.0.2 }; }
		map m { type ipv4_addr : verdict; elements = { 10.0.0.3 : jump accepting, 10.0.0.4 : jump accepting }; }
		chain accepting { counter; counter; accept; }
		chain translating { ip daddr 203.0.113.8 return; counter; snat to 192.0.2.7; }
		chain early { type filter hook postrouting priority -150; ip saddr @s accept; ip saddr vmap @m; drop; }
		chain nat { type nat hook postrouting priority 100; jump translating; masquerade; }
	}`, "-f", "-")
	const (
		many   = 1 << 20
		passes = "passes; if the rules of chain nat, which has too many to read"
		either = "masquerade; passes; if the rules of chain translating, which has too many to read"
		hit    = "192.0.2.7"
		drop   = "192.0.2.7; may be dropped by drop"
	)
	for _, tt := range []struct {
		left   foreign.Near
		read   [3]int // chains, sets and maps
		unread int    // rules
		want   string
	}{
		{foreign.Near{many, many, many}, [3]int{4, 1, 1}, 0, hit},
		{foreign.Near{1, many, many}, [3]int{0, 0, 0}, 5, passes},
		{foreign.Near{2, many, many}, [3]int{1, 0, 0}, 7, either},
		{foreign.Near{5, many, many}, [3]int{2, 1, 1}, 9, either + "; may be dropped by drop"},
		{foreign.Near{6, many, many}, [3]int{2, 0, 0}, 3, hit},
		{foreign.Near{7, many, many}, [3]int{2, 0, 0}, 3, hit},
		{foreign.Near{8, many, many}, [3]int{3, 1, 1}, 5, drop},
		{foreign.Near{12, many, many}, [3]int{3, 1, 1}, 5, drop},
		{foreign.Near{13, many, many}, [3]int{4, 1, 1}, 0, hit},
		{foreign.Near{many, 0, many}, [3]int{0, 0, 0}, 5, passes},
		{foreign.Near{many, many, 0}, [3]int{4, 0, 0}, 0, drop},
		{foreign.Near{many, many, 1}, [3]int{4, 0, 0}, 0, drop},
		{foreign.Near{many, many, 2}, [3]int{4, 1, 0}, 0, drop},
		{foreign.Near{many, many, 3}, [3]int{4, 1, 0}, 0, drop},
		{foreign.Near{many, many, 4}, [3]int{4, 1, 1}, 0, hit},
	} {
		tracer, err := foreign.TracerNear(t.Context(), c, tt.left)
		if err != nil {
			t.Fatal(err)
		}
		chains, sets, maps := tracer.Content()
		p := foreign.Packet{Src: netip.MustParseAddr("10.0.0.3"), Dst: netip.MustParseAddr("203.0.113.9")}
		got := traced(tracer.TraceAt(p, unix.NF_INET_POST_ROUTING))
		if content := [3]int{chains, sets, maps}; content != tt.read || tracer.Unread != tt.unread || got != tt.want {
			t.Errorf("%+v: read %d, not %d: %s", tt, content, tracer.Unread, got)
		}
	}
}
