package kernel

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// 1,000 configs: explanations from the file and from the kernel, the kernel's
// actual decision, and the specification agree.
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
					live, ok, err := k.ReadBack(t.Context())
					if err != nil || !ok {
						t.Fatalf("read back %t, error %v", ok, err)
					}
					for _, p := range packets {
						conn := p.Connection()
						p.Verdict, p.Seen = cases.Specified(c, conn), cases.SpecifiedSources(c, conn, node)
						if r.Mode() == nft.ModeIPTables {
							p.Verdict = cases.Specified(cases.ForView(c), conn)
						}
						wire.check(t, k, r, p)
						if file, kernel := r.Policy.Decide(conn), live.Policy.Decide(conn); file != p.Verdict || kernel != p.Verdict {
							t.Errorf("%s %s: explained as %s from the file, as %s from the kernel", p.Line, p.Verdict, file, kernel)
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

func TestRandomConfigsAreReadBack(t *testing.T) {
	t.Parallel()
	for _, mode := range cases.Modes() {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			ns := nfttest.NewNS(t, "node")
			k, m := open(t, ns), cases.NewMaker(3)
			for range nfttest.Rounds(10, 150, 150) {
				c, o := m.Config(), m.Options(mode)
				want := nft.Compile(c, o).On(m.Addresses())
				apply(t, k, want, Look{Others: true})
				got, ok, err := open(t, ns).ReadBack(t.Context())
				if err != nil || !ok {
					t.Fatalf("read back %t, error %v: config %+v, options %+v", ok, err, c, o)
				}
				type result struct{ Text, Hash, Chain string }
				chain := map[nft.Mode]string{nft.ModeIPTables: want.Chain()}[mode]
				if diff := cmp.Diff(result{want.String(), want.Hash(), chain}, result{got.String(), got.Hash(), got.Chain()}); diff != "" {
					t.Fatalf("read back (-want +got):\n%s", diff)
				}
				if !got.Same(want) {
					t.Fatal("what is read back does not count as the same")
				}
				inSync(t, ns, got)
			}
		})
	}
}

func TestReadBackIgnoresForeignRules(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	ns := nfttest.NewNS(t, "node")
	for _, step := range []func(){
		func() {},
		func() { loadForeign(t, ns) },
		func() { nfttest.NFT(t, ns, "", "add", "table", "inet", nft.TableName) },
		func() {
			nfttest.NFT(t, ns, cases.Load(t, "default").File(t, "ruleset.nft"), "-f", "-")
			nfttest.NFT(t, ns, "", "add", "element", "inet", nft.TableName, "non-masq-v4-a", "{ 198.51.100.0/24 }")
		},
	} {
		step()
		if r, ok, err := open(t, ns).ReadBack(t.Context()); ok || err != nil {
			t.Errorf("read back %t, error %v:\n%s", ok, err, r)
		}
	}
}

// A rule that another program added does not change the policy that the hash is of.
func TestPolicyIsReadBackAfterTampering(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "node")
	want := cases.Load(t, "both-families").Compile(nft.ModeNFTables)
	for _, rule := range []string{"insert accept", "insert ip daddr 198.51.100.0/24 masquerade", "add ip daddr 198.51.100.0/24 masquerade"} {
		apply(t, open(t, ns), want, everything)
		do, rule, _ := strings.Cut(rule, " ")
		nfttest.NFT(t, ns, "", append([]string{do, "rule", "inet", nft.TableName, "postrouting"}, strings.Fields(rule)...)...)
		k := open(t, ns)
		back, ok, err := k.ReadBack(t.Context())
		if !ok || err != nil || back.Hash() != want.Hash() {
			t.Fatalf("beside %q: read back %t, error %v, %s for %s", rule, ok, err, back.Hash(), want.Hash())
		}
		if diffs := apply(t, k, back, everything); len(diffs) == 0 {
			t.Errorf("beside %q nothing differs", rule)
		}
		inSync(t, ns, want)
	}
}

// Held is for output: it describes the current state, right or wrong.
func TestHeldDescribesTheKernelAfterTampering(t *testing.T) {
	nfttest.Require(t, "nft", "iptables-nft")
	for _, mode := range []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} {
		ns := nfttest.NewNS(t, "node")
		held := func() (string, bool) {
			t.Helper()
			r, ok, err := open(t, ns).Held(t.Context(), cases.DefaultChain, false)
			if err != nil || ok && r.Mode() != mode {
				t.Errorf("mode %s, error %v", r.Mode(), err)
			}
			return r.Hash(), ok
		}
		if hash, ok := held(); ok {
			t.Errorf("%s: an empty kernel has %s", mode, hash)
		}
		want := cases.Load(t, "default").Compile(mode)
		apply(t, open(t, ns), want, everything)
		if hash, ok := held(); !ok || hash != want.Hash() {
			t.Errorf("%s: got %s, want %s", mode, hash, want.Hash())
		}
		if mode == nft.ModeNFTables {
			nfttest.NFT(t, ns, "", "add", "element", "inet", nft.TableName, "non-masq-v4-a", "{ 198.51.100.0/24 }")
		} else {
			iptables(t, ns, nfnetlink.IPv4, "-I", cases.DefaultChain, "-d", "198.51.100.0/24", "-j", "ACCEPT")
			iptables(t, ns, nfnetlink.IPv4, "-D", cases.DefaultChain, "2")
		}
		if hash, ok := held(); !ok || hash == want.Hash() {
			t.Errorf("%s: after tampering got %s", mode, hash)
		}
	}
}

func TestManyCIDRsAreReadBackExactly(t *testing.T) {
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
	apply(t, open(t, ns), want, Look{})
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
	set := &nftables.Set{Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: nft.TableName}, Name: s.Name + nft.SideA, KeyType: nftables.TypeIPAddr}
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
