package kernel

import (
	"fmt"
	"net/netip"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
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

func TestRandomConfigsAreInSyncOnceApplied(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k, m := open(t, ns), cases.NewMaker(3)
			for i := range nfttest.Rounds(10, 30, 150) {
				c, o := m.Config(), m.Options(mode)
				if i < 2 {
					c = config.Config{EnableIPv6: i == 0} // valid, too
				}
				o.Layout = layouts.Of(mode, []string{cases.DefaultChain, "NON-MASQUERADE-DAEMON", "LONG-NAME-OF-A-CHAIN-23"}[i%3])
				want := nft.Compile(c, o).On(m.Addresses())
				apply(t, k, want, layout.Everything)
				got, ok, err := open(t, ns).Installed(t.Context())
				if err != nil || !ok || got != (layout.Installed{Layout: want.Layout, Hash: want.Hash()}) {
					t.Fatalf("installed are %+v, %t, %v, want %s: config %+v, options %+v", got, ok, err, want.Hash(), c, o)
				}
				inSync(t, ns, want)
				if left := notOurs(t, ns, want.Chain()); len(left) > 0 { // as of the config or the chain before
					t.Fatalf("%q are left after %s", left, want)
				}
			}
		})
	}
}
