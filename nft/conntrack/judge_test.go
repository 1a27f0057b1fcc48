package conntrack

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// entryOf returns an entry. requested is the destination before DNAT, "" if there was none.
func entryOf(protocol uint8, src, requested, dst, seenAs string) Entry {
	a := netip.MustParseAddrPort
	return Entry{Key: Key{
		Original: Tuple{Src: a(src), Dst: a(cmp.Or(requested, dst)), Protocol: protocol},
		Reply:    Tuple{Src: a(dst), Dst: a(seenAs), Protocol: protocol},
	}}
}

var alone = Beside{Others: func(_, _ netip.Addr, _ bool) bool { return false }}

// judgeOf returns a judge for a policy of both families, on a node without addresses and
// without other programs.
func judgeOf(change func(*config.Config)) *Judge {
	c := config.Default(config.Defaults{EnableIPv6: true})
	change(&c)
	return NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), alone)
}

// Policies for which everything is stale that is translated, or is not.
func exemptAll(c *config.Config)     { c.NonMasqueradeCIDRs = cases.CIDRs("0.0.0.0/0", "::/0") }
func masqueradeAll(c *config.Config) { c.NonMasqueradeCIDRs = nil }

func TestStaleConnections(t *testing.T) {
	const pod, exempt, other, node = "10.244.1.2:4000", "10.9.0.9:53", "203.0.113.9:53", "192.0.2.1:20000"
	const pod6, exempt6, other6, node6 = "[fd00::2]:4000", "[fd00:9::9]:53", "[2001:db8:1::9]:53", "[2001:db8::1]:20000"
	others := func(src, dst netip.Addr, dnat bool) bool {
		return src == netip.MustParseAddr("172.17.0.2") || dnat && src == netip.MustParseAddr("10.244.1.9") ||
			dst == netip.MustParseAddr("198.51.100.9")
	}
	var local []netip.Prefix
	for _, s := range []string{"192.0.2.1/32", "127.0.0.0/8", "198.19.0.0/24", "2001:db8::1/128", "2001:db8:9::/64"} {
		local = append(local, netip.MustParsePrefix(s))
	}
	c := config.Default(config.Defaults{EnableIPv6: true})
	c.NonMasqueradeCIDRs = cases.CIDRs("10.0.0.0/8", "fd00::/8")
	j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), Beside{Local: local, Others: others})
	c.EnableIPv6 = false
	off := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), Beside{Local: local, Others: others})
	for _, tt := range []struct {
		name                        string
		src, requested, dst, seenAs string
		state                       string
		status                      Status
		zone                        uint16
		judge                       *Judge
		stale                       bool
	}{
		{name: "IPv6, which is off, and translated", src: pod6, dst: other6, seenAs: node6, judge: off, stale: true},
		{name: "IPv6, which is off, not translated", src: pod6, dst: other6, seenAs: pod6, judge: off},

		{name: "only the port differs", src: pod, dst: exempt, seenAs: "10.244.1.2:4001"},
		{name: "exempt after DNAT", src: pod, requested: "198.18.0.10:53", dst: exempt, seenAs: node, stale: true},
		{name: "masqueraded after DNAT", src: pod, requested: "10.96.0.10:53", dst: other, seenAs: node},
		{name: "another port after DNAT", src: "10.244.1.9:4000", requested: "10.9.0.9:80", dst: exempt, seenAs: node},
		{name: "to itself by a Service", src: pod, requested: "198.18.0.10:53", dst: "10.244.1.2:53", seenAs: node},

		{name: "perhaps translated by Docker", src: "172.17.0.2:4000", dst: exempt, seenAs: node},
		{name: "perhaps exempted by a rule of others", src: pod, dst: "198.51.100.9:53", seenAs: pod},
		{name: "marked by kube-proxy", src: "10.244.1.9:4000", requested: "198.18.0.10:53", dst: exempt, seenAs: node},
		{name: "not marked, as it has no DNAT", src: "10.244.1.9:4000", dst: exempt, seenAs: node, stale: true},
		{name: "translated in a zone", src: pod, dst: exempt, seenAs: node, zone: 7},
		{name: "untranslated in a zone", src: pod, dst: other, seenAs: pod, zone: 7},
		{name: "IPv6, translated in a zone", src: pod6, dst: exempt6, seenAs: node6, zone: 1},
		{name: "expected by a helper, translated", src: pod, dst: exempt, seenAs: node, status: Expected | SrcNAT},
		{name: "expected by a helper, untranslated", src: pod, dst: other, seenAs: pod, status: Expected},

		{name: "from the node", src: "192.0.2.1:4000", dst: other, seenAs: "192.0.2.1:4000"},
		{name: "to the node", src: pod, dst: "192.0.2.1:53", seenAs: pod},
		{name: "from an address of a local range", src: "198.19.0.77:4000", dst: other, seenAs: "198.19.0.77:4000"},
		{name: "to an address of a local range", src: pod, dst: "198.19.0.77:53", seenAs: pod},
		{name: "next to the local range", src: pod, dst: "198.19.1.0:53", seenAs: pod, stale: true},
		{name: "IPv6, to an address of a local range", src: pod6, dst: "[2001:db8:9::77]:53", seenAs: pod6},
		{name: "to multicast", src: pod, dst: "224.0.0.251:5353", seenAs: pod},
		{name: "IPv6, to multicast", src: pod6, dst: "[ff05::fb]:5353", seenAs: pod6},

		{name: "TCP, established", src: pod, dst: other, seenAs: pod, state: "ESTABLISHED", stale: true},
		{name: "TCP, waiting", src: pod, dst: other, seenAs: pod, state: "TIME_WAIT"},
		{name: "TCP, closed", src: pod, dst: other, seenAs: pod, state: "CLOSE"},
		{name: "SCTP, opening", src: pod, dst: other, seenAs: pod, state: "CLOSED", stale: true},
		{name: "SCTP, closed", src: pod, dst: other, seenAs: pod, state: "CLOSED", status: SeenReply},
	} {
		e := entryOf(unix.IPPROTO_TCP, tt.src, tt.requested, tt.dst, tt.seenAs)
		e.Status, e.Zone, e.State = tt.status, tt.zone, tt.state
		if got := cmp.Or(tt.judge, j).Stale(&e); got != tt.stale {
			t.Errorf("%s: stale is %t", tt.name, got)
		}
	}
	e := entryOf(unix.IPPROTO_TCP, pod6, "", "[2001:db8:9::77]:53", pod6)
	if a, b := j.Now(&e), off.Now(&e); a != nft.Local || b != nft.Exempt {
		t.Errorf("to a local range: %s, with IPv6 off %s", a, b)
	}
}

// A connection is stale only if the policy gives none that its entry can be of, by whatever interfaces, the address
// that was seen. If no address depends on interfaces, it then is. Pods keep an address that the node has, whichever
// they would get now; masquerading may choose any that is in no list, or that the node has.
func TestConnectionsAreStaleIfThePolicyCannotHaveMadeThem(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(51)
	seen := map[string]int{}
	for range nfttest.Rounds(60, 150, 10_000) {
		c, node := m.Config(), m.Addresses()
		byInterface := slices.ContainsFunc(c.SNATRules, func(r config.SNATRule) bool { return len(r.Out) > 0 })
		local := append(m.Addresses(), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))
		evidence := alone
		for _, a := range append(local, node...) {
			evidence.Local = append(evidence.Local, netip.PrefixFrom(a, a.BitLen()))
		}
		j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(node), evidence)
		for n := range 10 {
			src, dst := m.Near(c, n%2 == 0), m.Near(c, n%2 == 0)
			possible := possibleSources(m, c, src, dst, node, append(local, node...))
			for _, text := range append(cases.SNATAddresses(), "192.0.2.1", "192.0.2.2", "2001:db8::1", src.String()) {
				from := netip.MustParseAddr(text)
				if from.Is6() != dst.Is6() {
					continue
				}
				at := func(a netip.Addr, port uint16) string { return netip.AddrPortFrom(a, port).String() }
				e := entryOf(unix.IPPROTO_UDP, at(src, 4000), "", at(dst, 53), at(from, 20000))
				stale, may := j.Stale(&e), possible(from)
				if stale && may || !stale && !may && !byInterface && j.Forwarded(&e) {
					t.Fatalf("%s to %s, seen as %s, the node has %s and %s: stale is %t\n%+v", src, dst, from, node, local, stale, c)
				}
				seen[fmt.Sprint(j.Now(&e), " stale ", stale)]++
			}
		}
	}
	for _, what := range []string{
		"exempt stale true", "exempt stale false", "masqueraded stale true", "masqueraded stale false", " stale false",
	} {
		if seen[what] < 30 {
			t.Errorf("%v", seen)
		}
	}
}

// possibleSources returns whether a connection between two addresses may leave from an address, according to the
// specification: with each value of what an entry does not tell.
func possibleSources(
	m cases.Maker, c config.Config, src, dst netip.Addr, node, local []netip.Addr,
) func(netip.Addr) bool {
	listed := slices.Clone(c.SNATAddresses)
	ofFamily := func(list []config.CIDR) bool {
		return len(list) == 0 || slices.ContainsFunc(list, func(c config.CIDR) bool { return c.Addr().Is6() == dst.Is6() })
	}
	for _, r := range c.SNATRules {
		if ofFamily(r.From) && ofFamily(r.To) { // else it is for no connection of the family
			listed = append(listed, r.Addresses...)
		}
	}
	verdicts, sources, masquerades := map[nft.Verdict]bool{}, map[netip.Addr]bool{}, false
	names := append(cases.Interfaces(), "wg9", "w9", "eth09", "eth9", "pod9", "none9")
	for _, in := range names {
		for _, out := range names {
			conn := m.Connection(src, dst)
			conn.FromNode, conn.ToNode, conn.In, conn.Out = false, false, in, out
			verdict := cases.Specified(c, conn)
			verdicts[verdict] = true
			if verdict != nft.Masqueraded {
				continue
			}
			some := cases.SpecifiedSources(c, conn, node)
			for _, a := range some {
				sources[a] = true
			}
			masquerades = masquerades || len(some) == 0
		}
	}
	return func(from netip.Addr) bool {
		inList := slices.ContainsFunc(listed, func(c config.CIDR) bool { return c.Contains(from) })
		return len(verdicts) > 1 || verdicts[nft.Exempt] == (from == src) &&
			(from == src || sources[from] || masquerades && (!inList || slices.Contains(local, from)))
	}
}

func TestStaleConnectionsAreCounted(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	table := newTable(dialIn(ns))
	masquerades, exempts := judgeOf(masqueradeAll), judgeOf(exemptAll)
	count := func(j *Judge, stale, entries int) (oldest time.Time) {
		t.Helper()
		var visited [2]int
		visit := func(i int) func() func(*Entry) {
			return func() func(*Entry) { return func(*Entry) { visited[i]++ } }
		}
		s, err := table.CountStale(j, visit(0), visit(1))
		if visited != [2]int{entries, entries} {
			t.Errorf("%d of %d entries were visited", visited, entries)
		}
		if err != nil || s.Count != stale || s.Examined != entries || s.Entries != entries {
			t.Errorf("%+v: %v, want %d of %d", s, err, stale, entries)
		}
		return s.Oldest
	}
	count(masquerades, 0, 0)
	all := untranslated(23, "203.0.113.9")
	insert(t, ns, all[:3]...)
	if oldest := count(masquerades, 3, 3); !oldest.IsZero() {
		t.Errorf("the oldest is of %s, which the kernel does not record", oldest)
	}
	count(exempts, 0, 3)
	if err := ns.Sysctl("net/netfilter/nf_conntrack_timestamp", "1"); err != nil {
		t.Fatal(err)
	}
	insert(t, ns, all[3:]...)
	var first time.Time
	for _, e := range entries(t, table, Filter{}) {
		if !e.Started.IsZero() && (first.IsZero() || e.Started.Before(first)) {
			first = e.Started
		}
	}
	if oldest := count(masquerades, 23, 23); oldest.IsZero() || !oldest.Equal(first) {
		t.Errorf("the oldest is of %s, want %s", oldest, first)
	}
}

func TestPartOfATableIsScaledToAll(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "node")
	insert(t, ns, untranslated(30, "203.0.113.9")...)
	for _, tt := range []struct {
		most   int
		sample Sample
	}{
		{sampleSize, Sample{30, 30, false}},
		{31, Sample{30, 30, false}},
		{30, Sample{30, 30, false}},
		{10, Sample{10, 30, true}},
	} {
		table := newTable(dialIn(ns))
		table.sample = tt.most
		if s, err := table.CountStale(judgeOf(masqueradeAll)); err != nil || s.Count != 30 || s.Sample != tt.sample {
			t.Errorf("a sample of %d: %+v: %v", tt.most, s, err)
		}
	}
	failed := false
	table := newTable(throughSocket(dialIn(ns), func(n int) error {
		if n == 10 && !failed {
			failed = true
			return unix.ENOBUFS
		}
		return nil
	}))
	s, err := table.CountStale(judgeOf(masqueradeAll))
	if want := (Sample{30, 30, false}); err != nil || !failed || s.Count != 30 || s.Sample != want {
		t.Errorf("interrupted once: %+v: %v", s, err)
	}
	if n := newTable(nil).sample; n != 200_000 {
		t.Errorf("a sample has %d", n)
	}
}
