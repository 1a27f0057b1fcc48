package kernel

import (
	"fmt"
	"net/netip"
	"slices"
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
	configs, each := nfttest.Rounds(3, 12, 250), nfttest.Rounds(1, 4, 10)
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			m, wire := cases.NewMaker(seed), newWire(t)
			k := open(t, wire.Node)
			for range configs {
				c, node := m.Config(), m.Addresses()
				packets := packetsFor(t, m, wire, c, each)
				for _, mode := range cases.Modes() {
					r := nft.Compile(c, m.Options(mode)).WithAddresses(node)
					apply(t, k, r, everything)
					for _, p := range packets {
						conn := p.Connection()
						p.Verdict, p.Seen = cases.Specified(c, conn), cases.SpecifiedSources(c, conn, node)
						if mode == nft.ModeIPTables {
							p.Verdict = cases.Specified(cases.ForView(c), conn)
						}
						wire.check(t, k, r, p)
						_, verdict := judge.Explain(r.Policy, conn)
						if verdict != p.Verdict {
							t.Errorf("%s %s: explained as %s", p.Line, p.Verdict, verdict)
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

// Random policies replace each other, in both modes: the kernel has the rules of the last one, and of the one before,
// or of its chain, nothing is left. The source that a policy names is one of those that are specified.
func TestRandomPoliciesReplaceEachOther(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k, m := open(t, ns), cases.NewMaker(41)
			for i := range nfttest.Rounds(10, 30, 150) {
				c, node := podsOf(m, m.Config(), i), m.Addresses()
				if i/2 == 1 {
					c = config.Config{EnableIPv6: i == 2} // valid, too
				}
				if mode == nft.ModeIPTables {
					c = cases.ForView(c)
				}
				o := m.Options(mode)
				o.Layout = cases.Layout(mode, []string{cases.DefaultChain, "NON-MASQUERADE-DAEMON", "LONG-NAME-OF-A-CHAIN-23"}[i%3])
				r := nft.Compile(c, o).WithAddresses(node)
				apply(t, k, r, nft.WithLeftovers)
				isInstalled(t, ns, r)
				for n := range 40 {
					checkSource(t, c, r.Policy, node, m.Connection(m.Near(c, n%2 == 0), m.Near(c, n%2 == 0)))
				}
				if t.Failed() {
					t.Fatalf("config %d: %+v", i, c)
				}
			}
		})
	}
}

// podsOf lets half of the random configs list pods in both families: keys that need that otherwise hardly
// have an effect.
func podsOf(m cases.Maker, c config.Config, i int) config.Config {
	switch i % 4 {
	case 0:
		c.MasqueradeSrcCIDRs = append(c.MasqueradeSrcCIDRs, cases.CIDRs("10.0.0.0/8", "fd00::/8")...)
	case 1:
		c.MasqueradeSrcCIDRs, c.MasqueradeSrcInterfaces = nil, []config.Interface{{Name: "pod*"}, {Name: "eth*"}}
	}
	return c
}

// isInstalled checks that the kernel has the ruleset, as a new process finds it, and nothing else.
func isInstalled(t *testing.T, ns *nfttest.NS, r nft.Ruleset) {
	t.Helper()
	got, ok, err := open(t, ns).Installed(t.Context())
	if err != nil || !ok || got != (nft.Installed{Layout: r.Layout, Hash: r.Hash()}) {
		t.Errorf("installed are %+v, %t, %v, want %s", got, ok, err, r.Hash())
	}
	inSync(t, ns, r)
	if left := notOurs(t, ns, r.Chain()); len(left) > 0 {
		t.Errorf("%q are left after %s", left, r)
	}
}

// checkSource compares the address that a policy names for a connection with those that are specified.
func checkSource(t *testing.T, c config.Config, p nft.Policy, node []netip.Addr, conn nft.Connection) {
	t.Helper()
	if cases.Specified(c, conn) != nft.Masqueraded {
		return
	}
	sources := cases.SpecifiedSources(c, conn, node)
	if len(sources) == 0 {
		return
	}
	one, _ := judge.SourceAddress(p, conn)
	if !slices.Contains(sources, one) {
		t.Errorf("%+v: judge.SourceAddress says %s, specified are %s", conn, one, sources)
	}
}
