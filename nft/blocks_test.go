package nft_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

// Numbers that people decode logs with: they must be the same in all versions, for ever.
func TestBlocksOfPods(t *testing.T) {
	for _, tt := range []struct {
		size  int
		ports string
		count int
		// by the last byte of the pod
		blocks map[int]string
		node   string
	}{
		{0, "", 0, nil, ""},
		{250, "", 256, map[int]string{0: "1024-1273", 7: "2774-3023", 255: "64774-65023"}, "[65024-65535]"},
		{251, "", 256, map[int]string{0: "1024-1274", 255: "65029-65279"}, "[65280-65535]"},
		{252, "", 128, map[int]string{0: "1024-1275", 127: "33028-33279", 128: "1024-1275"}, "[33280-65535]"},
		{500, "", 128, map[int]string{7: "4524-5023", 135: "4524-5023"}, "[65024-65535]"},
		{1000, "", 32, map[int]string{31: "32024-33023", 255: "32024-33023"}, "[33024-65535]"},
		{2000, "", 16, map[int]string{16: "1024-3023", 15: "31024-33023"}, "[33024-65535]"},
		{16, "", 256, map[int]string{1: "1040-1055", 255: "5104-5119"}, "[5120-65535]"},
		{16, "1000-1047", 2, map[int]string{0: "1000-1015", 1: "1016-1031", 2: "1000-1015"}, "[1032-1047]"},
		{16, "1000-1046", 0, nil, ""},
		// A gap is left out by whole blocks, counted from the first port. Ranges may overlap.
		{10, "100-124,131-169", 4, map[int]string{0: "100-109", 1: "110-119", 2: "140-149", 3: "150-159"}, "[160-169]"},
		{10, "150-169,100-119,105-124", 2, map[int]string{1: "110-119"}, "[120-124 150-169]"},
		{10, "100-119,120-129", 2, map[int]string{0: "100-109"}, "[120-129]"},
		{2000, "59536-65535", 2, map[int]string{1: "61536-63535"}, "[63536-65535]"},
	} {
		ranges, err := config.ParsePorts(tt.ports)
		if err != nil {
			t.Fatal(err)
		}
		b := nft.NewPortBlocks(tt.size, ranges)
		if b.Count() != tt.count {
			t.Errorf("%d of %q: %d blocks, want %d", tt.size, tt.ports, b.Count(), tt.count)
			continue
		}
		for last, want := range tt.blocks {
			for _, pod := range []netip.Addr{
				netip.AddrFrom4([4]byte{10, 244, 3, byte(last)}), netip.AddrFrom16([16]byte{0: 0xfd, 14: 9, 15: byte(last)}),
			} {
				if got := b.Block(b.Of(pod)).String(); got != want {
					t.Errorf("%d of %q: %s has %s, want %s", tt.size, tt.ports, pod, got, want)
				}
			}
		}
		if got := fmt.Sprint(b.Node); tt.count > 0 && got != tt.node {
			t.Errorf("%d of %q: the node has %s, want %s", tt.size, tt.ports, got, tt.node)
		}
	}
}

// Each port of toPorts is in one block, or the node's, or in the rest of a gap; decoding a port
// finds the pod that encoding gave it to.
func TestEachPortOfABlockNamesItsPods(t *testing.T) {
	m := cases.NewMaker(49)
	for range 300 {
		ranges := make([]nft.PortRange, 1+m.IntN(3))
		for i := range ranges {
			low := 1 + m.IntN(60_000)
			ranges[i] = nft.PortRange{Min: uint16(low), Max: uint16(min(65535, low+m.IntN(20_000)))}
		}
		b := nft.NewPortBlocks(16+m.IntN(1985), ranges)
		in := func(port uint16, list []nft.PortRange) bool {
			return slices.ContainsFunc(list, func(r nft.PortRange) bool { return r.Min <= port && port <= r.Max })
		}
		node := 0
		for number := range b.Count() {
			for _, port := range []uint16{b.Block(number).Min, b.Block(number).Max} {
				owner, ok := b.Owner(port)
				if !ok || owner != number || in(port, b.Node) || !in(port, ranges) {
					t.Fatalf("%v: port %d of block %d is of %d, %t", ranges, port, number, owner, ok)
				}
			}
			for _, last := range b.LastBytes(number) {
				if got := b.Of(netip.AddrFrom4([4]byte{10, 0, 0, byte(last)})); got != number {
					t.Fatalf("a pod that ends in %d has block %d, not %d", last, got, number)
				}
			}
		}
		for _, r := range b.Node {
			node += int(r.Size())
			if _, ok := b.Owner(r.Min); ok || !in(r.Min, ranges) || !in(r.Max, ranges) {
				t.Fatalf("%v: %v is the node's", ranges, r)
			}
		}
		if n := b.Count(); n != 0 && (node < b.Size || n&(n-1) != 0 || n < 2 || n > 256) {
			t.Fatalf("%v: %d blocks of %d, %d ports for the node", ranges, n, b.Size, node)
		}
	}
}

func TestBlocksNeedRoom(t *testing.T) {
	const noRoom = "f:2:14: portsPerPod: toPorts has no room for two blocks and the node's own ports"
	const pods = "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	entries := func(n int) string {
		text := "snatRules:\n"
		for i := range n {
			text += fmt.Sprintf("- {from: [10.244.%d.0/24], addresses: [198.51.100.1]}\n", i)
		}
		return text
	}
	for _, tt := range []struct{ file, flag, want string }{
		{pods + "portsPerPod: 250", "", ""},
		{pods + "portsPerPod: 250", "20000-20748", noRoom},
		{pods + "portsPerPod: 250", "20000-20749", ""},
		{pods + "portsPerPod: 250\ntoPorts: 20000-20748", "", noRoom},
		{pods + "portsPerPod: 250\ntoPorts: ''", "20000-20748", ""},
		{pods + entries(16) + "portsPerPod: 250", "", ""},
		{pods + entries(17) + "portsPerPod: 250", "", "f:20:14: portsPerPod: 256 blocks of each of 17 entries of " +
			"snatRules are " +
			"more than 4096 chains: choose larger blocks, of which there are fewer, or write fewer entries"},
		{pods + entries(64) + "portsPerPod: 1000", "", ""},
		{"enableIPv6: true\n" + pods + entries(8) + "portsPerPod: 250", "", ""},
		{"enableIPv6: true\n" + pods + entries(9) + "portsPerPod: 250", "", "f:13:14: portsPerPod: 256 blocks of each of 9 " +
			"entries of snatRules, in two families, are more than 4096 chains: choose larger blocks, of which there are " +
			"fewer, or write fewer entries"},
	} {
		ports, err := config.ParsePorts(tt.flag)
		if err != nil {
			t.Fatal(err)
		}
		b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}, Ports: ports},
			config.Source{Name: "f", Data: []byte(tt.file)})
		got := ""
		if err := b.Problems.Err(); err != nil {
			got = err.Error()
		}
		if got != tt.want || (b.Ruleset == nil) != (tt.want != "") {
			t.Errorf("%q: %q, want %q", tt.file, got, tt.want)
		}
	}
}
