//go:build !386 && !arm

// github.com/google/nftables does not compile for 32 bits.

package kernel

import (
	"net/netip"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// It is not parallel: the library waits by select(2), which takes file descriptors below 1,024
// only, and tests next to it open thousands of connections.
func TestManyCIDRsAreWrittenExactly(t *testing.T) {
	nfttest.SkipIfShort(t)
	ns := nfttest.NewNS(t, "node")
	m := cases.NewMaker(4)
	c := config.Config{MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true}
	for i := range 10_000 {
		n := i / 2
		a, bits := netip.AddrFrom4([4]byte{10, byte(n >> 5), byte(n << 3), byte(m.IntN(256))}), 22+m.IntN(11)
		if i%2 == 1 {
			b := netip.MustParseAddr("fd00::").As16()
			b[2], b[3], b[m.IntN(10)+6] = byte(n>>8), byte(n), byte(m.IntN(256))
			a, bits = netip.AddrFrom16(b), 32+m.IntN(97)
		}
		p, err := a.Prefix(bits)
		if err != nil {
			t.Fatal(err)
		}
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	if v4, v6 := want.CIDRs(); v4 != 5000 || v6 != 5000 {
		t.Fatalf("%d and %d CIDRs, want 5000 each", v4, v6)
	}
	apply(t, open(t, ns), want, layout.Ours)
	for _, s := range want.Tables[0].Sets {
		var ranges []iprange.Range
		for _, p := range s.Prefixes {
			ranges = append(ranges, iprange.Of(p))
		}
		if diff := cmp.Diff(ranges, byTheLibrary(t, ns, s), cmp.Comparer(equalRanges)); diff != "" {
			t.Errorf("set %s (-want +got):\n%s", s.Name, diff)
		}
	}
	inSync(t, ns, want)
}

func equalRanges(a, b iprange.Range) bool { return a == b }

// byTheLibrary reads a set with github.com/google/nftables, which returns the
// bounds from the last to the first.
func byTheLibrary(t *testing.T, ns *nfttest.NS, s nft.Set) []iprange.Range {
	t.Helper()
	c, err := nftables.New(nftables.AsLasting(), nftables.WithNetNSFd(ns.Fd()))
	runtime.KeepAlive(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.CloseLasting(); err != nil {
			t.Error(err)
		}
	}()
	set := &nftables.Set{Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: nft.TableName}, Name: s.Name +
		nft.SideA, KeyType: nftables.TypeIPAddr}
	elements, err := c.GetSetElements(set)
	if err != nil {
		t.Fatal(err)
	}
	var ranges []iprange.Range
	var next netip.Addr
	for i, e := range elements {
		a, _ := netip.AddrFromSlice(e.Key)
		switch {
		case e.IntervalEnd:
			next = a
		case i == 0:
			t.Fatalf("set %s: no end after %s", s.Name, a)
		default:
			ranges = append([]iprange.Range{{From: a, To: next.Prev()}}, ranges...)
		}
	}
	return ranges
}
