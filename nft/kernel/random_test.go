package kernel

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// 1,000 configs: explanations, the kernel's actual decision, and the specification agree.
func TestRealPacketsMatchTheSpecification(t *testing.T) {
	t.Parallel()
	const seeds = 4
	configs, each := nfttest.Rounds(5, 250, 250), nfttest.Rounds(1, 1, 10)
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
						if decided := r.Policy.Decide(conn); decided != p.Verdict {
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
		// Neither may have the address of the other host, or the pod's own one,
		// to which the node sends replies.
		if !usable(src) || !usable(dst) || w.AddAddr(w.Pod, src) != nil || w.AddAddr(w.Outside, dst) != nil {
			continue
		}
		p := cases.Packet{Src: src, Dst: dst, Proto: nfttest.UDP}
		if m.IntN(2) == 0 {
			p.Proto = nfttest.TCP
		}
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
			for range nfttest.Rounds(10, 150, 150) {
				c, o := m.Config(), m.Options(mode)
				want := nft.Compile(c, o).On(m.Addresses())
				apply(t, k, want, layout.Everything)
				got, ok, err := open(t, ns).Installed(t.Context())
				if err != nil || !ok || got != (layout.Installed{Layout: want.Layout, Hash: want.Hash()}) {
					t.Fatalf("installed are %+v, %t, %v, want %s: config %+v, options %+v", got, ok, err, want.Hash(), c, o)
				}
				inSync(t, ns, want)
			}
		})
	}
}

// Installed is the policy that we wrote, whatever other programs did to its rules.
func TestInstalledRulesAreIdentifiedByTheHashInTheKernel(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft", "iptables-nft-restore")
	none := func(t *testing.T, ns *nfttest.NS, when string) {
		t.Helper()
		if found, ok, err := open(t, ns).Installed(t.Context()); ok || err != nil {
			t.Errorf("%s: installed are %+v, %v", when, found, err)
		}
	}
	for mode, attacks := range map[nft.Mode][]func(*attacker){
		nft.ModeNFTables: {
			func(*attacker) {},
			does("insert rule TABLE postrouting accept"),
			does("add rule TABLE postrouting ip daddr 198.51.100.0/24 masquerade"),
			does("add element TABLE SET { 198.51.100.0/24 }"),
			does("flush set TABLE SET"),
			does("add chain TABLE foreign"),
		},
		nft.ModeIPTables: {
			func(*attacker) {},
			runs("-I IP-MASQ-AGENT -d 198.51.100.0/24 -j ACCEPT"),
			runs("-A IP-MASQ-AGENT -j ACCEPT"),
			runs("-D IP-MASQ-AGENT 2"),
			runs("-E IP-MASQ-AGENT RENAMED"),
		},
	} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			none(t, ns, "without rules")
			loadForeign(t, ns)
			none(t, ns, "next to other programs' rules")
			nfttest.NFT(t, ns, "", "add", "table", "inet", nft.TableName)
			none(t, ns, "with an empty table")
			k, want := open(t, ns), cases.Load(t, "both-families").Compile(mode)
			for i, attack := range attacks {
				apply(t, k, want, everything)
				a := &attacker{t: t, ns: ns, table: "inet " + nft.TableName, want: want}
				if mode == nft.ModeNFTables {
					a.set = liveSet(t, ns)
				}
				attack(a)
				found, ok, err := open(t, ns).Installed(t.Context())
				if err != nil || !ok || found != (layout.Installed{Layout: want.Layout, Hash: want.Hash()}) {
					t.Errorf("attack %d: installed are %+v, %t, %v", i, found, ok, err)
				}
			}
			apply(t, k, want, everything)
			last := &attacker{t: t, ns: ns, table: "inet " + nft.TableName, want: want}
			if mode == nft.ModeNFTables {
				last.nft(fmt.Sprintf("delete rule TABLE postrouting handle %d", last.rule(-1)))
			} else {
				last.deleteLast()
				iptables(t, ns, nfnetlink.IPv6, "-F")
			}
			if found, ok, err := open(t, ns).Installed(t.Context()); err != nil || !ok || found.Hash != "" {
				t.Errorf("without the rule that has the hash: installed are %+v, %t, %v", found, ok, err)
			}
		})
	}
}

func TestManyCIDRsAreWrittenExactly(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	ns := nfttest.NewNS(t, "node")
	m := cases.NewMaker(4)
	c := config.Config{MasqLinkLocal: true, MasqLinkLocalIPv6: true, EnableIPv6: true}
	for i := range 10_000 {
		n := i / 2
		a, bits := netip.AddrFrom4([4]byte{10, byte(n >> 5), byte(n << 3), byte(m.IntN(256))}), 22+m.IntN(11)
		if i%2 == 1 {
			b := netip.MustParseAddr("fd00::").As16()
			b[2], b[3], b[m.IntN(10)+6] = byte(n>>8), byte(n), byte(m.IntN(256))
			a, bits = netip.AddrFrom16(b), 32+m.IntN(97)
		}
		p, err := a.Prefix(bits)
		if err != nil {
			t.Fatal(err)
		}
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, config.CIDR{Prefix: p})
	}
	want := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	if v4, v6 := want.CIDRs(); v4 != 5000 || v6 != 5000 {
		t.Fatalf("%d and %d CIDRs, want 5000 each", v4, v6)
	}
	apply(t, open(t, ns), want, layout.Ours)
	for _, s := range want.Tables[0].Sets {
		var ranges []iprange.Range
		for _, p := range s.Prefixes {
			ranges = append(ranges, iprange.Of(p))
		}
		if diff := cmp.Diff(ranges, byTheLibrary(t, ns, s), cmp.Comparer(equalRanges)); diff != "" {
			t.Errorf("set %s (-want +got):\n%s", s.Name, diff)
		}
	}
	inSync(t, ns, want)
}

func equalRanges(a, b iprange.Range) bool { return a == b }

// byTheLibrary reads a set with github.com/google/nftables, which returns the
// bounds from the last to the first.
func byTheLibrary(t *testing.T, ns *nfttest.NS, s nft.Set) []iprange.Range {
	t.Helper()
	c, err := nftables.New(nftables.AsLasting(), nftables.WithNetNSFd(ns.Fd()))
	runtime.KeepAlive(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.CloseLasting(); err != nil {
			t.Error(err)
		}
	}()
	set := &nftables.Set{Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: nft.TableName}, Name: s.Name +
		nft.SideA, KeyType: nftables.TypeIPAddr}
	elements, err := c.GetSetElements(set)
	if err != nil {
		t.Fatal(err)
	}
	var ranges []iprange.Range
	var next netip.Addr
	for i, e := range elements {
		a, _ := netip.AddrFromSlice(e.Key)
		switch {
		case e.IntervalEnd:
			next = a
		case i == 0:
			t.Fatalf("set %s: no end after %s", s.Name, a)
		default:
			ranges = append([]iprange.Range{{From: a, To: next.Prev()}}, ranges...)
		}
	}
	return ranges
}
