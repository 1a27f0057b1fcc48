package nft

import (
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// A wire sends real packets over pod, node and outside host. No two of them
// have the same source port, so each is a connection of its own.
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
	return &wire{nfttest.NewTopology(t), firstPort}
}

// send sends one packet: from the node where it has the source, else from the
// pod, which gets it.
func (w *wire) send(t testing.TB, p packet) nfttest.Sighting {
	t.Helper()
	w.port++
	f := nfttest.Flow{
		Proto: p.proto, From: w.Pod,
		Src: netip.AddrPortFrom(p.src, w.port), Dst: netip.AddrPortFrom(p.dst, destPort),
	}
	if p.src.IsLoopback() || slices.Contains([]netip.Addr{w.NodeV4, w.NodeV6, w.GatewayV4, w.GatewayV6}, p.src) {
		f.From = w.Node
	} else if err := w.AddAddr(w.Pod, p.src); err != nil {
		t.Fatal(err)
	}
	limited := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	if p.dst.IsMulticast() || p.dst.IsLinkLocalUnicast() && f.From == w.Node || p.dst == limited {
		f.Dev = "eth0"
	}
	return nfttest.MustSend(t, w.Topology, f)
}
