package main

import (
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

const snatConfig = `enableIPv6: true
nonMasqueradeCIDRs: [10.0.0.0/8, "fd00::/8"]
snatAddresses: [198.51.100.211, 198.51.100.224/29, "2001:db8:5::/64", 198.51.100.12]
`

// ruleConfig has in addition, for some pods, an entry of snatRules.
const ruleConfig = snatConfig + `snatRules:
- from: [10.244.1.200/32, "fd00:10:244:1::9/128"]
  addresses: [198.51.100.77, "2001:db8:5:1::77"]
- from: [10.244.1.192/26]
  to: [203.0.113.0/24]
  addresses: [198.51.100.211]
`

// assign and withdraw add an address to the node and remove it.
func (n trafficNode) assign(a string) {
	n.t.Helper()
	addr := netip.MustParseAddr(a)
	n.check(n.AddAddr("lo", netip.PrefixFrom(addr, addr.BitLen())))
}

func (n trafficNode) withdraw(a string) {
	n.t.Helper()
	nfttest.Run(n.t, n.NS, "", "ip", "address", "del", a, "dev", "lo")
}

// sourcePort is the last one used. The kernel may choose a port again, whose
// connection still has the address of an earlier policy.
var sourcePort atomic.Uint32

// podsSee compares what the far end sees of pods with the policy, and with explain.
func (n trafficNode) podsSee(want nft.Ruleset) {
	n.t.Helper()
	for i, pod := range []string{"10.244.1.2", "10.244.1.7", "10.244.1.200", "fd00:10:244:1::2", "fd00:10:244:1::9"} {
		src, dst, node := netip.MustParseAddr(pod), netip.MustParseAddr("203.0.113.9"), n.top.NodeV4
		if src.Is6() {
			dst, node = netip.MustParseAddr("2001:db8:77::9"), n.top.NodeV6
		}
		n.check(n.top.AddAddr(n.top.Pod, src))
		expected, rule := judge.SourceAddress(want.Policy, nft.Connection{Src: src, Dst: dst, OutInterface: "eth0"})
		if !expected.IsValid() {
			expected = node
		}
		for _, proto := range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
			from := netip.AddrPortFrom(src, uint16(20_000+sourcePort.Add(1)%10_000))
			flow := nfttest.Flow{
				Proto: proto, From: n.top.Pod, Src: from, Dst: netip.AddrPortFrom(dst, uint16(7000+i)), Answered: true,
			}
			if seen := nfttest.MustSend(n.t, n.top, flow).Seen.Addr(); seen != expected {
				n.t.Errorf("%s is seen from %s, want %s", pod, seen, expected)
			}
		}
		x, text := n.explained(dst.String(), "--from", pod, "--config", n.path)
		if x.ShouldSee != expected || x.Sees.IsValid() && x.Sees != expected {
			n.t.Errorf("%s is seen from %s, explained is %s", pod, expected, text)
		}
		says := fmt.Sprintf("by entry %d of snatRules", rule.Number)
		if rule.Number > 0 && !strings.Contains(text, says) {
			n.t.Errorf("%q is not in: %s", says, text)
		}
	}
}

func TestAddressesOfTheNodeAreFollowed(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	n.swap(ruleConfig)
	want := wants(t, ruleConfig)
	d := n.start("--resync-interval=3600")
	d.began(want)
	for range 2 {
		d.await("snat_addresses_missing")
	}
	n.podsSee(want)
	for _, step := range []struct {
		do      func(string)
		address string
		has     []netip.Addr
		says    string // besides
	}{
		{n.assign, "198.51.100.211", cases.Addrs("198.51.100.211"), "snat_addresses_found"},
		{n.assign, "198.51.100.225", cases.Addrs("198.51.100.211", "198.51.100.225"), ""},
		{n.assign, "2001:db8:5::7", cases.Addrs("198.51.100.211", "198.51.100.225", "2001:db8:5::7"), "snat_addresses_found"},
		{n.assign, "2001:db8:5::8", cases.Addrs("198.51.100.211", "198.51.100.225", "2001:db8:5::7", "2001:db8:5::8"), ""},
		{n.withdraw, "198.51.100.211/32", cases.Addrs("198.51.100.225", "2001:db8:5::7", "2001:db8:5::8"), ""},
		{n.withdraw, "2001:db8:5::8/128", cases.Addrs("198.51.100.225", "2001:db8:5::7"), ""},
		{n.withdraw, "198.51.100.225/32", cases.Addrs("2001:db8:5::7"), "snat_addresses_missing"},
		{n.assign, "198.51.100.226", cases.Addrs("198.51.100.226", "2001:db8:5::7"), "snat_addresses_found"},
		// Of snatRules alone.
		{n.assign, "198.51.100.77", cases.Addrs("198.51.100.226", "2001:db8:5::7", "198.51.100.77"), ""},
		{
			n.assign, "2001:db8:5:1::77",
			cases.Addrs("198.51.100.226", "2001:db8:5::7", "198.51.100.77", "2001:db8:5:1::77"), "",
		},
		{n.withdraw, "198.51.100.77/32", cases.Addrs("198.51.100.226", "2001:db8:5::7", "2001:db8:5:1::77"), ""},
		{n.withdraw, "2001:db8:5:1::77/128", cases.Addrs("198.51.100.226", "2001:db8:5::7"), ""},
		{n.assign, "198.51.100.212", nil, ""}, // not in the list
	} {
		step.do(step.address)
		if step.has == nil {
			continue
		}
		line := d.await("snat_addresses_changed")
		if !strings.Contains(line.Message(), "addresses of this node changed") || line["hash"] != want.Hash() {
			t.Errorf("%v", line)
		}
		if step.says != "" {
			d.await(step.says)
		}
		d.holds(want.WithAddresses(step.has))
		n.podsSee(want.WithAddresses(step.has))
	}
	d.answers()
	d.forgive("stale_connections") // of a removed address
	d.silent()

	// A restarted agent finds its rules, and writes nothing.
	d.stop()
	generation := n.generation()
	d = n.start("--resync-interval=3600")
	d.await("rules_in_place")
	if now := n.generation(); now != generation {
		t.Errorf("generation %d became %d", generation, now)
	}
	d.stop()

	// Changes in the meantime are applied by the first transaction.
	n.assign("198.51.100.227")
	d = n.start("--resync-interval=3600")
	d.await("config_applied")
	d.holds(want.WithAddresses(cases.Addrs("198.51.100.226", "198.51.100.227", "2001:db8:5::7")))
	n.withdraw("198.51.100.226/32")
	d.await("snat_addresses_changed")
	has := want.WithAddresses(cases.Addrs("198.51.100.227", "2001:db8:5::7"))
	d.holds(has)
	n.podsSee(has)
	const said = "this node has no address of entry 1 of snatRules"
	if text := n.run("status", "--config", n.path).stdout; !strings.HasPrefix(unwrap(text), said) {
		t.Errorf("status does not begin with %q:\n%s", said, text)
	}
}

// temporary gives the node a network of IPv6 with a temporary address, which masquerading
// prefers, and returns that.
func (n trafficNode) temporary(network string) string {
	n.t.Helper()
	for _, s := range [][2]string{{"eth0.use_tempaddr", "2"}, {"eth0.accept_dad", "0"}, {"all.accept_dad", "0"}} {
		n.check(n.Sysctl("net.ipv6.conf."+s[0], s[1]))
	}
	nfttest.Run(n.t, n.top.Node, "", "ip", "address", "add", network, "dev", "eth0", "nodad", "mngtmpaddr")
	within := netip.MustParsePrefix(network).Masked()
	address := ""
	nfttest.Until(n.t, "a temporary address that is usable", func() bool {
		text := nfttest.Run(n.t, n.top.Node, "", "ip", "-6", "-o", "address", "show", "dev", "eth0", "temporary")
		for word := range strings.FieldsSeq(text) {
			p, err := netip.ParsePrefix(word)
			if err == nil && within.Contains(p.Addr()) && !strings.Contains(text, "tentative") {
				address = p.Addr().String()
			}
		}
		return address != ""
	})
	return address
}

// SNAT never uses a temporary address, masquerading does, also one of a list.
func TestConnectionsFromTemporaryAddressesOfTheNodeAreRight(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	const pod, dst = "fd00:10:244:1::2", "[2001:db8:77::9]:5000"
	for _, tt := range []struct{ name, config string }{
		{"an entry that does not match", "snatRules: [{from: ['fd00:8::/64'], addresses: ['2001:db8:5::/64']}]\n"},
		{"an entry of which the node has no other", "snatRules: [{from: ['fd00:10:244::/48'], addresses: [TEMPORARY]}]\n"},
		{"a list of which the node has no other", "snatAddresses: [TEMPORARY]\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			temporary := n.temporary("2001:db8:5::7/64")
			const base = "enableIPv6: true\nstaleConnections: all\n"
			n.swap(base)
			d := n.start("--resync-interval=3600")
			d.began(wants(t, base))
			if seen := n.open(nfttest.UDP, dst).Seen.Addr().String(); seen != temporary {
				t.Fatalf("seen from %s, want %s", seen, temporary)
			}
			text := base + strings.ReplaceAll(tt.config, "TEMPORARY", "'"+temporary+"'")
			has := cases.Addrs("2001:db8:5::7")
			n.swap(text)
			d.applied("config", wants(t, text).WithAddresses(has))
			for _, c := range n.connections() {
				if c.Stale || !strings.Contains(c.SeenAs, temporary) {
					t.Errorf("%+v", c)
				}
			}
			if got := n.run("connections", "--flush", "--yes"); got.code != exitDone || len(n.connections()) != 1 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// An address can be on several interfaces, and with IPv4 several times on one, with other
// prefix lengths. Temporary addresses of a network in the list are never used.
func TestAddressIsUsedUntilTheNodeHasItNowhere(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	ip := func(commands ...string) {
		nfttest.Run(t, n.top.Node, strings.Join(commands, "\n")+"\n", "ip", "-batch", "-")
	}
	ip("address add 198.51.100.211/24 dev eth0", "address add 198.51.100.211/32 dev eth0",
		"address add 198.51.100.211 peer 10.77.0.1/32 dev eth0", "address add 198.51.100.211/32 dev lo",
		"address add 2001:db8:5::7/128 dev lo nodad")
	n.temporary("2001:db8:5::7/64")
	n.swap(snatConfig)
	want := wants(t, snatConfig)
	d := n.start("--resync-interval=3600")
	d.began(want.WithAddresses(cases.Addrs("198.51.100.211", "2001:db8:5::7")))
	n.podsSee(want.WithAddresses(cases.Addrs("198.51.100.211", "2001:db8:5::7")))
	open := n.open(nfttest.TCP, "203.0.113.9:7001").Seen.Addr()
	for i, gone := range []string{
		"198.51.100.211/24 dev eth0", "198.51.100.211/32 dev lo", "2001:db8:5::7/64 dev eth0", "198.51.100.211/32 dev eth0",
	} {
		// Another address shows when the agent has heard of it.
		has := cases.Addrs("198.51.100.211", "2001:db8:5::7")
		if i%2 == 0 {
			ip("address del "+gone, "address add 198.51.100.225/32 dev lo")
			has = append(has, cases.Addrs("198.51.100.225")...)
		} else {
			ip("address del "+gone, "address del 198.51.100.225/32 dev lo")
		}
		d.await("snat_addresses_changed")
		d.holds(want.WithAddresses(has))
		n.podsSee(want.WithAddresses(has))
	}
	for _, c := range n.connections("203.0.113.9") {
		if c.Stale && strings.HasPrefix(c.SeenAs, open.String()) || open != netip.MustParseAddr("198.51.100.211") {
			t.Errorf("from %s: %+v", open, c)
		}
	}
	ip("address del 198.51.100.211 peer 10.77.0.1/32 dev eth0", "address del 2001:db8:5::7/128 dev lo")
	for range 2 {
		d.await("snat_addresses_missing")
	}
	d.holds(want)
}
