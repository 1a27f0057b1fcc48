package nft

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
)

func FuzzCoveredEntriesAreDropped(f *testing.F) {
	f.Add([]byte{4, 10, 0, 0, 0, 8, 4, 10, 1, 0, 0, 16, 4, 10, 0, 0, 0, 8})
	f.Add([]byte{4, 0, 0, 0, 0, 0, 4, 255, 255, 255, 255, 32, 4, 128, 0, 0, 0, 1})
	f.Add(binary.BigEndian.AppendUint64([]byte{6, 0xfd}, 7))
	f.Fuzz(func(t *testing.T, b []byte) {
		var list []config.CIDR
		for len(b) >= 6 && len(list) < 200 {
			a := netip.AddrFrom4([4]byte(b[1:5]))
			if b[0]%2 == 1 { // an IPv6 address with four variable bytes
				a = netip.AddrFrom16([16]byte{0: b[1], 1: b[2], 7: b[3], 15: b[4]})
			}
			p, err := a.Prefix(int(b[5]) % (a.BitLen() + 1))
			nfttest.NoError(t, err)
			list = append(list, config.CIDR{Prefix: p, Pos: config.Position{File: "f", Line: len(list) + 1, Col: 1}})
			b = b[6:]
		}
		for _, ipv6 := range []bool{false, true} {
			checkDropCovered(t, ofFamily(list, ipv6))
		}
	})
}

// checkDropCovered checks that the entries kept are those that no other entry
// covers, that the first of equal ones is kept, and that order and positions are
// those of the list.
func checkDropCovered(t *testing.T, list []config.CIDR) {
	t.Helper()
	covers := func(a, b config.CIDR) bool { return a.Bits() <= b.Bits() && a.Contains(b.Addr()) }
	var want []config.CIDR
	for i, c := range list {
		covered := false
		for j, o := range list {
			covered = covered || j != i && covers(o, c) && (o.Prefix != c.Prefix || j < i)
		}
		if !covered {
			want = append(want, c)
		}
	}
	got := NewList(slices.Clone(list))
	if !slices.Equal(got.CIDRs, want) {
		t.Errorf("of %v, %v are kept, want %v", list, got.CIDRs, want)
	}
	sorted := got.Prefixes()
	if !slices.IsSortedFunc(sorted,
		func(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) }) {
		t.Errorf("not sorted: %v", sorted)
	}
}

func TestManyCoveredEntriesAreFast(t *testing.T) {
	t.Parallel()
	list := make([]config.CIDR, 0, 200_000)
	for i := range cap(list) {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		list = append(list, config.CIDR{Prefix: netip.PrefixFrom(a, 32)})
	}
	list = append(list, config.CIDR{Prefix: netip.MustParsePrefix("10.0.0.0/8")})
	got := NewList(list)
	if len(got.CIDRs) != 1 {
		t.Errorf("%d CIDRs are kept, want 10.0.0.0/8 alone, which covers the others", len(got.CIDRs))
	}
}

func TestRangesAreChosenBySize(t *testing.T) {
	ranges := []PortRange{{Min: 1000, Max: 1999}, {Min: 5000, Max: 5000}, {Min: 1, Max: 65535}, {Min: 40000, Max: 40001}}
	var size float64
	for _, r := range ranges {
		size += float64(r.Size())
	}
	left := 1.0 // the probability that no earlier range was chosen
	for i, c := range PortChoices(ranges) {
		chance := left * float64(c.Size()) / float64(c.Remaining)
		if want := float64(ranges[i].Size()) / size; chance/want < 0.999999 || chance/want > 1.000001 {
			t.Errorf("range %s is chosen with %f, want %f", c, chance, want)
		}
		left -= chance
		if c.Last() != (i == len(ranges)-1) {
			t.Errorf("range %s: last is %t", c, c.Last())
		}
	}
}

func somewhere(ipv6 bool, n int) (all []netip.Addr) {
	for i := range n {
		if ipv6 {
			all = append(all, netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: byte(i >> 8), 15: byte(i)}))
		} else {
			all = append(all, netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}))
		}
	}
	return all
}

func TestRemovedAddressMovesOnlyItsOwnPods(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		for n := 2; n <= 64; n *= 2 {
			all := somewhere(ipv6, n)
			before := SNATRule{Present: all}.assign()
			used := map[netip.Addr]int{}
			for _, a := range before {
				used[a]++
			}
			for gone := range all {
				after := SNATRule{Present: slices.Delete(slices.Clone(all), gone, gone+1)}.assign()
				for b := range before {
					if before[b] != all[gone] && before[b] != after[b] {
						t.Fatalf("%s is removed, and bucket %d moves from %s to %s", all[gone], b, before[b], after[b])
					}
				}
			}
			// Far more than this is an uneven distribution: 256/n, binomially
			// distributed, are expected.
			if most := slices.Max(slices.Collect(maps.Values(used))); n <= 8 && (len(used) < n || most > 2*buckets/n) {
				t.Errorf("%d addresses: %d are used, one for %d of %d buckets", n, len(used), most, buckets)
			}
		}
	}
}

func TestAssignmentDoesNotDependOnTheOrder(t *testing.T) {
	all := somewhere(false, 9)
	want := SNATRule{Present: all}.assign()
	for range 10 {
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		if (SNATRule{Present: all}).assign() != want {
			t.Fatal(all)
		}
	}
}

// Nodes of two versions, and a restart, must agree.
func TestAssignmentIsTheSameInAllVersions(t *testing.T) {
	for ipv6, want := range map[bool]string{
		false: "198.51.100.2 198.51.100.0 198.51.100.0 198.51.100.2",
		true:  "2001:db8:: 2001:db8:: 2001:db8::2 2001:db8::",
	} {
		s := SNATRule{Present: somewhere(ipv6, 3)}
		got := ""
		for _, pod := range []string{"10.244.1.0", "fd00::1", "10.9.9.100", "fd00::ff"} {
			got += fmt.Sprint(" ", s.Address(netip.MustParseAddr(pod)))
		}
		if got[1:] != want {
			t.Errorf("%s, want %s", got[1:], want)
		}
	}
	if a := (SNATRule{}).Address(netip.MustParseAddr("10.0.0.1")); a.IsValid() {
		t.Errorf("%s without addresses", a)
	}
}
