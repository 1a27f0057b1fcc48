package conntrack

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/routes"
)

// entryOf returns an entry. requested is the destination before DNAT, "" if there was none.
func entryOf(protocol uint8, src, requested, dst, seenAs string) Entry {
	a := netip.MustParseAddrPort
	return Entry{Key: Key{
		Original: Tuple{Src: a(src), Dst: a(cmp.Or(requested, dst)), Protocol: protocol},
		Reply:    Tuple{Src: a(dst), Dst: a(seenAs), Protocol: protocol},
	}}
}

// A connection contradicts the policy only if that gives none that its entry can be of, by whatever interfaces, the
// address that was seen. If no address depends on interfaces, it then does. Pods keep an address that the node has,
// whichever they would get now; masquerading may choose any that is in no list, or that the node has.
func TestConnectionsContradictThePolicyIfItCannotHaveMadeThem(t *testing.T) {
	t.Parallel()
	m := cases.NewMaker(51)
	seen := map[string]int{}
	for range nfttest.Rounds(60, 150, 10_000) {
		c, addresses := m.Config(), m.Addresses()
		byInterface := slices.ContainsFunc(c.SNATRules, func(r config.SNATRule) bool { return len(r.Out) > 0 })
		local := append(m.Addresses(), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))
		local = append(local, addresses...)
		var networks []routes.Network
		for _, a := range local {
			networks = append(networks, routes.Network{Prefix: netip.PrefixFrom(a, a.BitLen()), Type: unix.RTN_LOCAL})
		}
		policy := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}).WithAddresses(addresses)
		comparison := NewComparison(policy, newNode(networks, nil, nil))
		for n := range 10 {
			src, dst := m.Near(c, n%2 == 0), m.Near(c, n%2 == 0)
			possible := possibleSources(m, c, src, dst, addresses, local)
			for _, text := range append(cases.SNATAddresses(), "192.0.2.1", "192.0.2.2", "2001:db8::1", src.String()) {
				from := netip.MustParseAddr(text)
				if from.Is6() != dst.Is6() {
					continue
				}
				at := func(a netip.Addr, port uint16) string { return netip.AddrPortFrom(a, port).String() }
				e := entryOf(unix.IPPROTO_UDP, at(src, 4000), "", at(dst, 53), at(from, 20000))
				ruling, found := comparison.Compare(&e)
				if found == Contradicts && possible(from) || found == Agrees && !possible(from) && !byInterface {
					t.Fatalf("%s to %s, seen as %s, the node has %s and %s: the connection %s\n%+v", src, dst, from, addresses,
						local, found, c)
				}
				seen[fmt.Sprint(ruling.Verdict, " ", found)]++
			}
		}
	}
	for _, what := range []string{
		"exempt agrees", "exempt contradicts", "masqueraded agrees", "masqueraded contradicts", "masqueraded interface",
	} {
		if seen[what] < 30 {
			t.Errorf("%q are too few: want 30, or they are not tested: %v", what, seen)
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
			conn.FromNode, conn.ToNode, conn.InInterface, conn.OutInterface = false, false, in, out
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
