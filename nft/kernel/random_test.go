package kernel

import (
	"fmt"
	"net/netip"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// Explanations, the kernel's actual decision, and the specification agree.
func TestRealPacketsMatchTheSpecification(t *testing.T) {
	t.Parallel()
	const seeds = 4
	configs, each := nfttest.Rounds(3, 12, 250), nfttest.Rounds(1, 1, 10)
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			m, wire := cases.NewMaker(seed), newWire(t)
			k := open(t, wire.Node)
			for range configs {
				c := m.Config()
				var rulesets []nft.Ruleset
				node := m.Addresses()
				for _, mode := range cases.Modes() {
					rulesets = append(rulesets, nft.Compile(c, m.Options(mode)).On(node))
				}
				packets := packetsFor(t, m, wire, c, each)
				for _, r := range rulesets {
					apply(t, k, r, everything)
					for _, p := range packets {
						conn := p.Connection()
						p.Verdict, p.Seen = cases.Specified(c, conn), cases.SpecifiedSources(c, conn, node)
						if r.Mode() == nft.ModeIPTables {
							p.Verdict = cases.Specified(cases.ForView(c), conn)
						}
						wire.check(t, k, r, p)
						if decided := judge.Decide(r.Policy, conn); decided != p.Verdict {
							t.Errorf("%s %s: explained as %s", p.Line, p.Verdict, decided)
						}
					}
				}
				if t.Failed() {
					t.Fatalf("config: %+v", c)
				}
			}
		})
	}
}

// packetsFor returns packets between existing hosts.
func packetsFor(t *testing.T, m cases.Maker, w *wire, c config.Config, n int) []cases.Packet {
	t.Helper()
	var packets []cases.Packet
	for len(packets) < n {
		ipv6 := m.IntN(2) == 0
		src, dst := m.Near(c, ipv6), m.Near(c, ipv6)
		node := w.NodeV4
		if ipv6 {
			node = w.NodeV6
		}
		if m.IntN(4) == 0 { // what the node itself sends
			src = node
		}
		// Neither may have the address of the other host, or the pod's own one,
		// to which the node sends replies.
		if src != node && (!usable(src) || w.AddAddr(w.Pod, src) != nil) || !usable(dst) || w.AddAddr(w.Outside, dst) != nil {
			continue
		}
		protos := []nfttest.Proto{nfttest.UDP, nfttest.UDP, nfttest.TCP, nfttest.TCP, nfttest.SCTP, nfttest.ICMP}
		p := cases.Packet{Src: src, Dst: dst, Proto: protos[m.IntN(len(protos))]}
		p.Line = fmt.Sprintf("%s %s %s", src, dst, p.Proto)
		packets = append(packets, p)
	}
	return packets
}

// usable reports whether a host can have the address, and send from it through a
// router: on the link of node and outside host, broadcast addresses and the
// routers' anycast address cannot be assigned.
func usable(a netip.Addr) bool {
	link4, link6 := netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")
	return a.IsGlobalUnicast() && unrouted(a) && !link4.Contains(a) && !link6.Contains(a)
}
