package conntrack

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
)

func TestStaleConnections(t *testing.T) {
	const pod, exempt, other, node = "10.244.1.2:4000", "10.9.0.9:53", "203.0.113.9:53", "192.0.2.1:20000"
	docker := func(src, _ netip.Addr, dnat bool) bool {
		return src == netip.MustParseAddr("172.17.0.2") || dnat && src == netip.MustParseAddr("10.244.1.9")
	}
	local := []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("127.0.0.0/8")}
	j := NewJudge(nft.NewPolicy(config.Default(config.Defaults{}), nft.Options{Layout: native.Layout{}}), local, docker)
	for _, tt := range []struct {
		name                        string
		src, requested, dst, seenAs string
		status                      Status
		zone                        uint16
		protocol                    uint8
		state                       string
		stale                       bool
	}{
		{name: "exempt and translated", src: pod, dst: exempt, seenAs: node, status: SrcNATDone, stale: true},
		{name: "exempt, not translated", src: pod, dst: exempt, seenAs: pod, status: SrcNATDone},
		{name: "masqueraded, not translated", src: pod, dst: other, seenAs: pod, status: SrcNATDone, stale: true},
		{name: "masqueraded and translated", src: pod, dst: other, seenAs: node, status: SrcNATDone},
		{name: "only the port differs", src: pod, dst: exempt, seenAs: "10.244.1.2:4001", status: SrcNATDone},
		{name: "exempt after DNAT", src: pod, requested: "198.18.0.10:53", dst: exempt, seenAs: node, status: SrcNATDone, stale: true},
		{name: "translated by Docker", src: "172.17.0.2:4000", dst: exempt, seenAs: node, status: SrcNATDone},
		{name: "marked by kube-proxy", src: "10.244.1.9:4000", requested: "198.18.0.10:53", dst: exempt, seenAs: node, status: SrcNATDone},
		{name: "not marked, as it has no DNAT", src: "10.244.1.9:4000", dst: exempt, seenAs: node, status: SrcNATDone, stale: true},
		{name: "to itself by a Service", src: pod, requested: "198.18.0.10:53", dst: "10.244.1.2:53", seenAs: node, status: SrcNATDone},
		{name: "from the node", src: "192.0.2.1:4000", dst: other, seenAs: "192.0.2.1:4000", status: SrcNATDone},
		{name: "to the node", src: pod, dst: "192.0.2.1:53", seenAs: pod, status: SrcNATDone},
		{name: "to multicast", src: pod, dst: "224.0.0.251:5353", seenAs: pod, status: SrcNATDone},
		{name: "began before the rules", src: pod, dst: other, seenAs: pod, stale: true},
		{name: "never decided, in a zone of Open vSwitch", src: pod, dst: other, seenAs: pod, zone: 7},
		{name: "decided, in a zone", src: pod, dst: other, seenAs: pod, zone: 7, status: SrcNATDone, stale: true},
		{name: "TCP, established", src: pod, dst: other, seenAs: pod, protocol: unix.IPPROTO_TCP, state: "ESTABLISHED", stale: true},
		{name: "TCP, closed", src: pod, dst: other, seenAs: pod, protocol: unix.IPPROTO_TCP, state: "TIME_WAIT"},
		{name: "SCTP, opening", src: pod, dst: other, seenAs: pod, protocol: unix.IPPROTO_SCTP, state: "CLOSED", stale: true},
		{name: "SCTP, closed", src: pod, dst: other, seenAs: pod, protocol: unix.IPPROTO_SCTP, state: "CLOSED", status: SeenReply | SrcNATDone},
		{name: "IPv6, which is off", src: "[fd00::2]:4000", dst: "[2001:db8::9]:53", seenAs: "[2001:db8::1]:4000", status: SrcNATDone, stale: true},
	} {
		if tt.requested == "" {
			tt.requested = tt.dst
		}
		a := netip.MustParseAddrPort
		e := Entry{
			Original: Tuple{Src: a(tt.src), Dst: a(tt.requested), Protocol: tt.protocol},
			Reply:    Tuple{Src: a(tt.dst), Dst: a(tt.seenAs), Protocol: tt.protocol},
			Status:   tt.status, Zone: tt.zone, State: tt.state,
		}
		if got := j.Stale(&e); got != tt.stale {
			t.Errorf("%s: stale is %t", tt.name, got)
		}
	}
}

// Pods keep an address that the node has, whichever they would get now.
func TestConnectionsFromAddressesThatAreNotAllowedAreStale(t *testing.T) {
	c := config.Default(config.Defaults{})
	for _, a := range []string{"198.51.100.11/32", "198.51.100.64/29"} {
		c.SNATAddresses = append(c.SNATAddresses, config.CIDR{Prefix: netip.MustParsePrefix(a)})
	}
	const node, listed, within, other = "192.0.2.1", "198.51.100.11", "198.51.100.65", "198.51.100.12"
	for _, tt := range []struct {
		has, seen string
		stale     bool
	}{
		{listed, listed, false},
		{listed + " " + within, within, false},
		{listed, within, true}, // the node does not have it any more
		{listed, node, true},   // masqueraded before
		{listed, other, true},  // of an earlier config
		{node, node, false},
		{node, listed, true},
	} {
		var addresses []netip.Addr
		for _, a := range strings.Fields(tt.has) {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).On(addresses), nil, func(_, _ netip.Addr, _ bool) bool { return false })
		a := netip.MustParseAddrPort
		e := Entry{
			Original: Tuple{Src: a("10.244.1.2:4000"), Dst: a("203.0.113.9:53")},
			Reply:    Tuple{Src: a("203.0.113.9:53"), Dst: a(tt.seen + ":20000")}, Status: SrcNATDone,
		}
		if got := j.Stale(&e); got != tt.stale {
			t.Errorf("the node has %s, seen as %s: stale is %t", tt.has, tt.seen, got)
		}
	}
}

// An entry does not contain the interfaces of its packets.
func TestVerdictThatDependsOnInterfacesIsNotStale(t *testing.T) {
	c := config.Default(config.Defaults{})
	c.NonMasqueradeOutInterfaces = []config.Interface{{Name: "wg*"}}
	j := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), nil, func(_, _ netip.Addr, _ bool) bool { return false })
	for _, tt := range []struct {
		dst   string
		stale bool
	}{
		{"203.0.113.9:53", false}, // not masqueraded if it leaves by wg0
		{"10.9.0.9:53", true},     // exempt in any case
	} {
		a := netip.MustParseAddrPort
		e := Entry{
			Original: Tuple{Src: a("10.244.1.2:4000"), Dst: a(tt.dst)},
			Reply:    Tuple{Src: a(tt.dst), Dst: a("192.0.2.1:20000")}, Status: SrcNATDone,
		}
		if got := j.Stale(&e); got != tt.stale {
			t.Errorf("%s: stale is %t", tt.dst, got)
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
	table := New(dialIn(ns))
	nobody := func(_, _ netip.Addr, _ bool) bool { return false }
	c := config.Default(config.Defaults{})
	masquerades := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), nil, nobody)
	c.NonMasqueradeCIDRs = []config.CIDR{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}
	exempts := NewJudge(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}), nil, nobody)
	count := func(j *Judge, stale, entries int) (oldest time.Time) {
		t.Helper()
		s, err := table.CountStale(j)
		if err != nil || s.Count != stale || s.Examined != entries || s.Entries != entries {
			t.Errorf("%+v: %v, want %d of %d", s, err, stale, entries)
		}
		return s.Oldest
	}
	count(masquerades, 0, 0)
	insert(t, ns, 3) // not translated
	if oldest := count(masquerades, 3, 3); !oldest.IsZero() {
		t.Errorf("the oldest is of %s, which the kernel does not record", oldest)
	}
	count(exempts, 0, 3)
	if err := ns.Sysctl("net/netfilter/nf_conntrack_timestamp", "1"); err != nil {
		t.Fatal(err)
	}
	insertFrom(t, ns, 3, 5)
	var first time.Time
	for _, e := range entries(t, table, Filter{}) {
		if !e.Started.IsZero() && (first.IsZero() || e.Started.Before(first)) {
			first = e.Started
		}
	}
	if oldest := count(masquerades, 5, 5); oldest.IsZero() || !oldest.Equal(first) {
		t.Errorf("the oldest is of %s, want %s", oldest, first)
	}
}

func TestPartOfATableIsScaledToAll(t *testing.T) {
	for _, tt := range []struct {
		Sample
		partial bool
		want    int // for 10
	}{
		{Sample{Examined: 100, Entries: 100}, false, 10},
		{Sample{Examined: 100, Entries: 300}, false, 10}, // others went away meanwhile
		{Sample{Examined: sampleSize, Entries: sampleSize}, false, 10},
		{Sample{Examined: sampleSize, Entries: 3 * sampleSize}, true, 30},
	} {
		if tt.Partial() != tt.partial || tt.estimate(10) != tt.want {
			t.Errorf("%+v: partial %t, 10 stand for %d", tt.Sample, tt.Partial(), tt.estimate(10))
		}
	}
}
