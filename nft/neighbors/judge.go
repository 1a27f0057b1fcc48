package neighbors

import (
	"fmt"
	"net/netip"

	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/older"
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
	if e.Local, err = node.LocalPrefixes(); err != nil {
		return e, err
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
	e.Others = func(src, dst netip.Addr, dnat bool) bool { return legacy[dst.Is6()] || rewrites.Meet(src, dst, dnat) }
	return e, nil
}
