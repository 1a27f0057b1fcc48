package kernel

import (
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// A wire sends real packets between pod, node and outside host. Each has a
// different source port, so each is a separate connection.
type wire struct {
	*nfttest.Topology
	port uint16
}

const (
	firstPort = 2000 // outside all ranges of the cases for --to-ports
	destPort  = 7777
)

func newWire(t testing.TB) *wire {
	t.Helper()
	w := &wire{nfttest.NewTopology(t), firstPort}
	for _, text := range cases.SNATAddresses() { // not on eth0, because IPv6 may choose them there for masquerading
		a := netip.MustParseAddr(text)
		if err := w.Node.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// unrouted reports whether an address is in a range that the Internet does not
// route: private, reserved, or for documentation and benchmarks. Packets are sent
// only to such addresses, although they stay in separate namespaces.
func unrouted(a netip.Addr) bool {
	return a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() ||
		slices.ContainsFunc([]string{
			"100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24",
			"203.0.113.0/24", "240.0.0.0/4", "2001:db8::/32",
		}, func(p string) bool { return netip.MustParsePrefix(p).Contains(a) })
}

// send sends one packet: from the node if it has the source address, otherwise
// from the pod, to which it is assigned.
func (w *wire) send(t testing.TB, p cases.Packet) nfttest.Sighting {
	t.Helper()
	w.port++
	f := nfttest.Flow{
		Proto: p.Proto, From: w.Pod,
		Src: netip.AddrPortFrom(p.Src, w.port), Dst: netip.AddrPortFrom(p.Dst, destPort),
	}
	if p.Src.IsLoopback() || slices.Contains([]netip.Addr{w.NodeV4, w.NodeV6, w.GatewayV4, w.GatewayV6}, p.Src) {
		f.From = w.Node
	} else if err := w.AddAddr(w.Pod, p.Src); err != nil {
		t.Fatal(err)
	}
	limited := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	if p.Dst.IsMulticast() || p.Dst.IsLinkLocalUnicast() && f.From == w.Node || p.Dst == limited {
		f.Dev = "eth0"
	}
	return nfttest.MustSend(t, w.Topology, f)
}
