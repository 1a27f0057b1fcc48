package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/layouts"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
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
				c, node := m.Config(), m.Addresses()
				packets := packetsFor(t, m, wire, c, each)
				for _, mode := range cases.Modes() {
					r := nft.Compile(c, m.Options(mode)).On(node)
					apply(t, k, r, everything)
					for _, p := range packets {
						conn := p.Connection()
						p.Verdict, p.Seen = cases.Specified(c, conn), cases.SpecifiedSources(c, conn, node)
						if mode == nft.ModeIPTables {
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

// The rules that the kernel has of a random policy are read, decoded, and followed for connections at the
// edges of its lists: in both modes they do what is specified. Of the policy or the chain before, nothing is left.
func TestRulesDoWhatThePolicySays(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k, m, c := open(t, ns), cases.NewMaker(41), connect(t, ns)
			seen := map[string]int{}
			for i := range nfttest.Rounds(30, 120, 4_000) {
				f := follower{Config: podsOf(m, m.Config(), i), node: m.Addresses(), t: t, seen: seen}
				if i/2 == 1 {
					f.Config = config.Config{EnableIPv6: i == 2} // valid, too
				}
				if mode == nft.ModeIPTables {
					f.Config = cases.ForView(f.Config)
				}
				o := m.Options(mode)
				o.Layout = layouts.Of(mode, []string{cases.DefaultChain, "NON-MASQUERADE-DAEMON", "LONG-NAME-OF-A-CHAIN-23"}[i%3])
				f.Ruleset = nft.Compile(f.Config, o).On(f.node)
				apply(t, k, f.Ruleset, layout.Everything)
				if i < nfttest.Rounds(10, 30, 150) {
					f.isInstalled(ns)
				}
				rules, err := trace.Read(c, trace.Scope{
					Own: func(nfnetlink.Chain) bool { return true }, Reads: func(nfnetlink.Chain) bool { return true }, Ours: true,
				})
				if err != nil {
					t.Fatal(err)
				}
				f.Tracer = trace.New(rules)
				for n := range 40 {
					f.check(m.Connection(m.Near(f.Config, n%2 == 0), m.Near(f.Config, n%2 == 0)))
				}
				if t.Failed() {
					t.Fatalf("config %d: %+v", i, f.Config)
				}
			}
			all := []string{"exempt", "local", "masqueraded"}
			if mode == nft.ModeNFTables {
				all = append(all, "from an address", "enforced", "dropped")
			}
			for _, what := range all {
				if seen[what] < 10 {
					t.Errorf("packets that are %s are too few of %v: want 10, or they are not tested", what, seen)
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

// A follower follows connections through the rules of a policy.
type follower struct {
	config.Config
	nft.Ruleset
	*trace.Tracer
	t    *testing.T
	node []netip.Addr
	seen map[string]int
}

// isInstalled checks that the kernel has the ruleset, as a new process finds it, and nothing else.
func (f follower) isInstalled(ns *nfttest.NS) {
	f.t.Helper()
	got, ok, err := open(f.t, ns).Installed(f.t.Context())
	if err != nil || !ok || got != (layout.Installed{Layout: f.Layout, Hash: f.Hash()}) {
		f.t.Errorf("installed are %+v, %t, %v, want %s", got, ok, err, f.Hash())
	}
	inSync(f.t, ns, f.Ruleset)
	if left := notOurs(f.t, ns, f.Chain()); len(left) > 0 {
		f.t.Errorf("%q are left after %s", left, f.Ruleset)
	}
}

// check compares what the rules do to a connection with what is specified.
func (f follower) check(c nft.Connection) {
	f.t.Helper()
	p := trace.Packet{
		Src: c.Src, Dst: c.Dst, SrcType: unix.RTN_UNICAST, DstType: unix.RTN_UNICAST, FromNode: c.FromNode,
		Out: routes.Interface{Index: 2, Name: c.Out}, Protocol: unix.IPPROTO_TCP, Unset: ^uint32(0),
	}
	if c.In != "" {
		p.In = routes.Interface{Index: 3, Name: c.In}
	}
	if c.FromNode {
		p.SrcType = unix.RTN_LOCAL
	}
	if c.ToNode {
		p.DstType = unix.RTN_LOCAL
	}
	want := cases.Specified(f.Config, c)
	sources := cases.SpecifiedSources(f.Config, c, f.node)
	if want != nft.Masqueraded {
		sources = nil
	}
	var to, expected []netip.Addr
	if len(sources) > 0 {
		snat, _ := judge.SourceOf(f.Policy, c)
		one, _ := snat.Of(c.Src)
		expected = []netip.Addr{one}
		f.seen["from an address"]++
		if !slices.Contains(sources, one) {
			f.t.Errorf("%+v: judge.SourceOf says %s, specified are %s", c, one, sources)
		}
	}
	f.seen[string(want)]++
	r := f.At(p, unix.NF_INET_POST_ROUTING)
	by, itself := r.Seen()
	enforced := slices.ContainsFunc(r.Findings, func(found trace.Finding) bool { return found.Keeps })
	for _, found := range by {
		for _, addresses := range found.To {
			to = append(to, addresses.From, addresses.To)
		}
	}
	slices.SortFunc(to, netip.Addr.Compare)
	if to = slices.Compact(to); !slices.Equal(to, expected) || itself != (want != nft.Masqueraded) && !enforced {
		f.t.Errorf("%+v is %s, expected from %s: the rules translate it to %s by %d rules, or not: %t", c, want, expected,
			to, len(by), itself)
	}
	if c.Src != c.Dst && enforced != judge.Enforced(f.Policy, c) {
		f.t.Errorf("%+v: the rules keep its address: %t", c, enforced)
	} else if enforced {
		f.seen["enforced"]++
	}
	if len(expected) > 0 || c.FromNode {
		return // to the tracer, an invalid packet would have another source
	}
	p.Known = true // then it may be invalid
	drops := slices.ContainsFunc(f.At(p, unix.NF_INET_POST_ROUTING).Findings, func(found trace.Finding) bool {
		return found.Code == trace.Drops
	})
	family, on := f.Policy.Family(c.Dst.Is6())
	if want := on && f.Policy.Drops(family) && want == nft.Masqueraded; drops != want {
		f.t.Errorf("%+v: if it is invalid, it is dropped: %t", c, drops)
	} else if drops {
		f.seen["dropped"]++
	}
}
