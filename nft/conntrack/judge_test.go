package conntrack

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
)

// entryOf returns an entry. requested is the destination before DNAT, "" if there was none.
func entryOf(protocol uint8, src, requested, dst, seenAs string) Entry {
	a := netip.MustParseAddrPort
	return Entry{Key: Key{
		Original: Tuple{Src: a(src), Dst: a(cmp.Or(requested, dst)), Protocol: protocol},
		Reply:    Tuple{Src: a(dst), Dst: a(seenAs), Protocol: protocol},
	}}
}

var alone = Evidence{Others: func(_, _ netip.Addr, _ bool) bool { return false }}

// judgeOf returns a judge for a policy of both families, on a node without addresses and
// without other programs.
func judgeOf(change func(*config.Config)) *Judge {
	c := config.Default(config.Defaults{EnableIPv6: true})
	change(&c)
	return NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), alone)
}

// Policies for which everything is stale that is translated, or is not.
func exemptAll(c *config.Config)     { c.NonMasqueradeCIDRs = cidrs("0.0.0.0/0", "::/0") }
func masqueradeAll(c *config.Config) { c.NonMasqueradeCIDRs = nil }

func cidrs(all ...string) (cidrs []config.CIDR) {
	for _, s := range all {
		cidrs = append(cidrs, config.CIDR{Prefix: netip.MustParsePrefix(s)})
	}
	return cidrs
}

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
	c.NonMasqueradeCIDRs = cidrs("10.0.0.0/8", "fd00::/8")
	j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), Evidence{Local: local, Others: others})
	c.EnableIPv6 = false
	off := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), Evidence{Local: local, Others: others})
	for _, tt := range []struct {
		name                        string
		src, requested, dst, seenAs string
		state                       string
		status                      Status
		zone                        uint16
		judge                       *Judge
		stale                       bool
	}{
		{name: "exempt and translated", src: pod, dst: exempt, seenAs: node, stale: true},
		{name: "exempt, not translated", src: pod, dst: exempt, seenAs: pod},
		{name: "masqueraded, not translated", src: pod, dst: other, seenAs: pod, stale: true},
		{name: "masqueraded and translated", src: pod, dst: other, seenAs: node},
		{name: "IPv6, exempt and translated", src: pod6, dst: exempt6, seenAs: node6, stale: true},
		{name: "IPv6, exempt, not translated", src: pod6, dst: exempt6, seenAs: pod6},
		{name: "IPv6, masqueraded, not translated", src: pod6, dst: other6, seenAs: pod6, stale: true},
		{name: "IPv6, masqueraded and translated", src: pod6, dst: other6, seenAs: node6},
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

// Pods keep an address that the node has, whichever they would get now.
func TestConnectionsFromAddressesThatAreNotAllowedAreStale(t *testing.T) {
	c := config.Default(config.Defaults{EnableIPv6: true})
	c.SNATAddresses = cidrs("198.51.100.11/32", "198.51.100.64/29")
	const pod, dst = "10.244.1.2", "203.0.113.9"
	const node, listed, within, other = "192.0.2.1", "198.51.100.11", "198.51.100.65", "198.51.100.12"
	for _, tt := range []struct {
		has, src, dst, seen string
		stale               bool
	}{
		{listed, pod, dst, listed, false},
		{listed + " " + within, pod, dst, within, false},
		{listed, pod, dst, within, true}, // the node does not have it any more
		{listed, pod, dst, node, true},   // masqueraded before
		{listed, pod, dst, other, true},  // of an earlier config
		{node, pod, dst, node, false},
		{node, pod, dst, listed, true},
		{listed, pod, dst, pod, true},
		{listed, pod, "10.9.0.9", pod, false},
		{listed, pod, "10.9.0.9", listed, true}, // exempt
		// The list has no address of IPv6.
		{listed, "fd00::2", "2001:db8:1::9", "2001:db8::1", false},
		{listed, "fd00::2", "2001:db8:1::9", "fd00::2", true},
	} {
		var addresses []netip.Addr
		for _, a := range strings.Fields(tt.has) {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(addresses), alone)
		at := func(s string, port uint16) string { return netip.AddrPortFrom(netip.MustParseAddr(s), port).String() }
		e := entryOf(unix.IPPROTO_UDP, at(tt.src, 4000), "", at(tt.dst, 53), at(tt.seen, 20000))
		if got := j.Stale(&e); got != tt.stale {
			t.Errorf("the node has %s, to %s, seen as %s: stale is %t", tt.has, tt.dst, tt.seen, got)
		}
	}
}

// So are those from an address that no entry of snatRules could choose now, by any interface.
func TestConnectionsFromAddressesThatSNATRulesCannotChooseAreStale(t *testing.T) {
	c := config.Default(config.Defaults{EnableIPv6: true})
	c.SNATAddresses = cidrs("198.51.100.11/32")
	c.SNATRules = []config.SNATRule{
		{From: cidrs("10.244.8.0/24"), To: cidrs("203.0.113.0/24"), Addresses: cidrs("198.51.100.30/32")},
		{Out: []config.Interface{{Name: "eth1"}}, Addresses: cidrs("198.51.100.40/32")},
		{From: cidrs("10.244.8.0/24", "fd00:8::/64"), Addresses: cidrs("198.51.100.20/30", "2001:db8:5::21/128")},
		{From: cidrs("10.244.8.0/23"), Addresses: cidrs("198.51.100.50/32")},
	}
	const partner, other, node = "203.0.113.9", "192.0.2.99", "192.0.2.1"
	const pool, next, elsewhere, pool6, elsewhere6 = "10.244.8.2", "10.244.9.2", "10.244.1.2", "fd00:8::2", "fd00::2"
	const all = "198.51.100.11 198.51.100.21 198.51.100.22 198.51.100.30 198.51.100.40 198.51.100.50 2001:db8:5::21"
	for _, tt := range []struct {
		has, src, dst string
		right, stale  []string // addresses that the far end sees
	}{
		{
			all, pool, partner,
			[]string{"198.51.100.30"},
			[]string{"198.51.100.21", "198.51.100.40", "198.51.100.50", "198.51.100.11", node, pool},
		},
		{ // either of several addresses, or that of the interface, which is not known
			all, pool, other,
			[]string{"198.51.100.21", "198.51.100.22", "198.51.100.40"},
			[]string{"198.51.100.20", "198.51.100.30", "198.51.100.50", "198.51.100.11", node, pool},
		},
		{all, next, partner, []string{"198.51.100.50", "198.51.100.40"}, []string{"198.51.100.21", "198.51.100.11", node}},
		{
			all, elsewhere, partner,
			[]string{"198.51.100.11", "198.51.100.40"},
			[]string{"198.51.100.30", "198.51.100.50", node},
		},
		{all, pool6, "2001:db8:1::9", []string{"2001:db8:5::21"}, []string{"2001:db8::1", pool6}},
		// Masquerading can choose any address of the node.
		{all, elsewhere6, "2001:db8:1::9", []string{"2001:db8::1", "2001:db8:5::21"}, []string{elsewhere6}},
		{node, elsewhere6, "2001:db8:1::9", []string{"2001:db8::1"}, []string{"2001:db8:5::21", elsewhere6}},
		// An entry of which the node has no address decides nothing.
		{"198.51.100.50", pool, partner, []string{"198.51.100.50"}, []string{"198.51.100.30", "198.51.100.21", node}},
		{"198.51.100.11", pool, partner, []string{"198.51.100.11"}, []string{"198.51.100.50", node}},
		{node, pool, partner, []string{node, "192.0.2.2"}, []string{"198.51.100.30", "198.51.100.40", "198.51.100.11", pool}},
	} {
		var addresses []netip.Addr
		for _, a := range strings.Fields(tt.has) {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(addresses), alone)
		at := func(s string, port uint16) string { return netip.AddrPortFrom(netip.MustParseAddr(s), port).String() }
		for i, seen := range slices.Concat(tt.right, tt.stale) {
			e := entryOf(unix.IPPROTO_UDP, at(tt.src, 4000), "", at(tt.dst, 53), at(seen, 20000))
			if got, want := j.Stale(&e), i >= len(tt.right); got != want {
				t.Errorf("the node has %s, %s to %s, seen as %s: stale is %t", tt.has, tt.src, tt.dst, seen, got)
			}
		}
	}
}

// An entry does not contain the interfaces of its packets.
func TestVerdictThatDependsOnInterfacesIsNotStale(t *testing.T) {
	j := judgeOf(func(c *config.Config) { c.NonMasqueradeOutInterfaces = []config.Interface{{Name: "wg*"}} })
	for _, tt := range []struct {
		dst   string
		stale bool
		now   nft.Verdict
	}{
		{"203.0.113.9:53", false, ""}, // not masqueraded if it leaves by wg0
		{"10.9.0.9:53", true, nft.Exempt},
	} {
		e := entryOf(unix.IPPROTO_UDP, "10.244.1.2:4000", "", tt.dst, "192.0.2.1:20000")
		if got := j.Stale(&e); got != tt.stale || j.Now(&e) != tt.now {
			t.Errorf("%s: stale is %t, now %q", tt.dst, got, j.Now(&e))
		}
		e.Reply.Dst = e.Original.Src
		if j.Stale(&e) {
			t.Errorf("%s: stale without a translation", tt.dst)
		}
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
