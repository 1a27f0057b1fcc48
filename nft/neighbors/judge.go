package neighbors

import (
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
)

// Judge returns a judge of connections for the policy that is wanted on this node.
func (s *State) Judge() (*conntrack.Judge, error) {
	e, err := s.Evidence()
	if err != nil {
		return nil, err
	}
	return conntrack.NewJudge(s.Want.Policy, e), nil
}

// Evidence returns what a judge must know of this node. If anything cannot be read, no
// connection is certain to be stale.
func (s *State) Evidence() (e conntrack.Evidence, err error) {
	if e.Local, err = routes.LocalPrefixes(); err != nil {
		return e, err
	}
	addresses, err := node.Addresses() // also those of a VRF, which has a table of local routes of its own
	if err != nil {
		return e, err
	}
	for _, a := range addresses {
		e.Local = append(e.Local, netip.PrefixFrom(a, a.BitLen()))
	}
	rewrites := foreign.FindRewrites(s.others)
	if rewrites.Everything() {
		e.Spared = append(e.Spared, "other programs have too many rules: they may translate any connection")
	}
	legacy := map[bool]bool{} // by whether it is IPv6
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		rules, err := older.LegacyRules("/proc/thread-self/net", family)
		if err != nil {
			return e, err
		}
		if rules > 0 {
			legacy[family == nfnetlink.IPv6] = true
			e.Spared = append(e.Spared, fmt.Sprintf("%stables-legacy -t nat -S lists rules of other programs: "+
				"they may translate any connection of the family", family))
		}
	}
	networks, err := routes.Networks()
	behindOne := oneInterface(networks)
	e.Others = func(src, dst netip.Addr, dnat bool) bool {
		return legacy[dst.Is6()] || rewrites.Meet(src, dst, dnat) || behindOne(src, dst)
	}
	return e, err
}

// oneInterface returns a function that reports whether two addresses are behind the same
// interface. If that is a bridge, or part of one, it may have forwarded what they exchange.
func oneInterface(networks []routes.Network) func(a, b netip.Addr) bool {
	routes := map[netip.Prefix][]string{}
	var lengths []int // of the prefixes, the longest first
	for _, n := range networks {
		routes[n.Prefix] = append(routes[n.Prefix], n.Interface)
		if at, found := slices.BinarySearchFunc(lengths, n.Bits(), func(a, b int) int { return b - a }); !found {
			lengths = slices.Insert(lengths, at, n.Bits())
		}
	}
	behind := func(a netip.Addr) []string {
		for _, bits := range lengths {
			if p, err := a.Prefix(bits); err == nil && routes[p] != nil {
				return routes[p]
			}
		}
		return nil
	}
	return func(a, b netip.Addr) bool {
		of := behind(b)
		return slices.ContainsFunc(behind(a), func(name string) bool { return slices.Contains(of, name) })
	}
}
