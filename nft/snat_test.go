package nft

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

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
			before := SNAT{Present: all}.assign()
			used := map[netip.Addr]int{}
			for _, a := range before {
				used[a]++
			}
			for gone := range all {
				after := SNAT{Present: slices.Delete(slices.Clone(all), gone, gone+1)}.assign()
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
	want := SNAT{Present: all}.assign()
	for range 10 {
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		if (SNAT{Present: all}).assign() != want {
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
		s := SNAT{Present: somewhere(ipv6, 3)}
		got := ""
		for _, pod := range []string{"10.244.1.0", "fd00::1", "10.9.9.100", "fd00::ff"} {
			a, _ := s.Of(netip.MustParseAddr(pod))
			got += fmt.Sprint(" ", a)
		}
		if got[1:] != want {
			t.Errorf("%s, want %s", got[1:], want)
		}
	}
	if _, some := (SNAT{}).Of(netip.MustParseAddr("10.0.0.1")); some {
		t.Error("there is one without addresses")
	}
}
