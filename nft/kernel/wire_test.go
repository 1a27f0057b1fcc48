package kernel

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
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
		nfttest.NoError(t, w.Node.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
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
		// Of two connections to the same port, one is lost if both draw a range that has one port.
		Src: netip.AddrPortFrom(p.Src, w.port), Dst: netip.AddrPortFrom(p.Dst, destPort+w.port-firstPort),
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

func TestPacketsMatchTheCases(t *testing.T) {
	t.Parallel()
	cases.Each(t, func(t *testing.T, c cases.Case) {
		c.SkipIfShort(t)
		t.Parallel()
		wire := newWire(t)
		k := open(t, wire.Node)
		for _, m := range c.Modes() {
			want := c.Compile(m)
			apply(t, k, want, everything)
			for _, p := range c.Packets {
				if unrouted(p.Dst) {
					wire.check(t, k, want, p)
				}
			}
		}
	})
}

// check sends a packet and compares what was seen of it with what is expected:
// its source, and in mode nftables the counter that was incremented.
func (w *wire) check(t *testing.T, k *Kernel, r nft.Ruleset, p cases.Packet) {
	t.Helper()
	before := counters(t, k)
	s := w.send(t, p)
	what := string(r.Mode()) + ": " + p.Line
	// The node's own address stays the same when it is masqueraded.
	if p.Src != w.NodeV4 && p.Src != w.NodeV6 && s.Masqueraded() != (p.Verdict == nft.Masqueraded) {
		t.Errorf("%s: sent from %s, seen from %s", what, s.Sent, s.Seen)
	}
	if p.Verdict == nft.Masqueraded {
		if p.Proto != nfttest.ICMP { // which has no ports
			checkPort(t, what, r.Policy, s)
		}
		w.checkSource(t, what, r.Policy, p, s)
	} else if s.Sent != s.Seen {
		t.Errorf("%s: sent from %s, seen from %s", what, s.Sent, s.Seen)
	}
	if r.Mode() == nft.ModeNFTables && len(r.Policy.Families) >= map[bool]int{false: 1, true: 2}[p.Dst.Is6()] {
		before[nft.Counts{IPv6: p.Dst.Is6(), Verdict: p.Verdict}]++
	}
	if diff := cmp.Diff(before, counters(t, k)); diff != "" {
		t.Errorf("%s: counters (-want +got):\n%s", what, diff)
	}
}

// checkSource compares the address of a masqueraded connection with those that are
// possible, and with the one that explain names.
func (w *wire) checkSource(t *testing.T, what string, p nft.Policy, packet cases.Packet, s nfttest.Sighting) {
	t.Helper()
	seen := s.Seen.Addr()
	named, _ := judge.SourceAddress(p, packet.Connection())
	switch {
	case !p.HasSNAT():
	case len(packet.Seen) > 0:
		if !slices.Contains(packet.Seen, seen) || named != seen {
			t.Errorf("%s: seen from %s, want one of %v, and %s", what, seen, packet.Seen, named)
		}
	case seen != w.NodeV4 && seen != w.NodeV6:
		t.Errorf("%s: seen from %s, want the node's address", what, seen)
	}
}

// checkPort compares the source port of a masqueraded connection with the policy.
func checkPort(t *testing.T, what string, p nft.Policy, s nfttest.Sighting) {
	t.Helper()
	port, ipv6 := s.Seen.Port(), s.Seen.Addr().Is6()
	switch b := p.PortBlocks(ipv6); {
	case b.Count() > 0:
		owner, ok := b.BlockOf(port)
		own := s.Sent.Addr() == s.Seen.Addr() // this node's
		if ok == own || ok && owner != b.BlockOfPod(s.Sent.Addr()) {
			t.Errorf("%s: port %d is of block %d, %t", what, port, owner, ok)
		}
	case len(p.Ports) > 0:
		if !slices.ContainsFunc(p.Ports, func(r nft.PortRange) bool { return r.Min <= port && port <= r.Max }) {
			t.Errorf("%s: port %d is outside %v", what, port, p.Ports)
		}
	case !p.RandomFully && port != s.Sent.Port():
		t.Errorf("%s: port %d became %d", what, s.Sent.Port(), port)
	}
}

// counters returns the number of packets of each counter.
func counters(t testing.TB, k *Kernel) map[nft.Counts]uint64 {
	t.Helper()
	all, err := k.Counters(native.Layout{})
	nfttest.NoError(t, err)
	m := map[nft.Counts]uint64{}
	for _, c := range all {
		m[nft.Counts{IPv6: c.IPv6, Verdict: c.Verdict}] = c.Packets
	}
	return m
}

func TestLoopbackWorks(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	nothing := config.Config{MasqLinkLocal: true, EnableIPv6: true} // exempt
	forced := nothing
	forced.ForceMasqueradeCIDRs = cases.CIDRs("0.0.0.0/0", "::/0")
	sources := nothing
	sources.MasqueradeSrcCIDRs = cases.CIDRs("127.0.0.0/8", "::1/128")
	exempt := forced
	exempt.ExemptHost = true
	lonely := nfttest.NewNS(t, "lonely")
	top := nfttest.NewTopology(t)
	// kubelet drops packets from elsewhere to a loopback address.
	nfttest.Run(t, top.Node, testdata(t, "kube-firewall.iptables"), "iptables-nft-restore", "--noflush")
	for _, ns := range []*nfttest.NS{lonely, top.Node} {
		k := open(t, ns)
		for _, mode := range cases.Modes() {
			for name, c := range map[string]config.Config{
				"default": config.Default(config.Defaults{EnableIPv6: true}), "nothing": nothing, "node exempt": exempt,
				"forced": forced, "sources": sources,
			} {
				o := nft.Options{Layout: cases.Layout(mode, cases.DefaultChain), RandomFully: true}
				apply(t, k, nft.Compile(c, o), everything)
				for _, dst := range []string{"127.0.0.1:8080", "127.9.9.9:8080", "[::1]:8080"} {
					for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
						flow := nfttest.Flow{Proto: proto, From: ns, To: ns, Dst: netip.MustParseAddrPort(dst)}
						s, err := nfttest.Send(flow)
						if err != nil || s.Sent != s.Seen {
							t.Errorf("%s, mode %s, %s: %s to %s: sent from %s, seen from %s: %v", ns, mode, name, proto, dst, s.Sent, s.Seen,
								err)
						}
					}
				}
			}
		}
	}
}
