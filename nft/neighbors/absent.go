package neighbors

import (
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/routes"
)

// An AbsentInterface is a list entry that matches no interface of the node.
type AbsentInterface struct {
	config.Interface
	Key string
	// Only means that the list restricts masquerading to its interfaces and
	// matches none: nothing is masqueraded.
	Only bool
	// Master is the interface to which the packets of those with a matching name belong,
	// because they are a part of it; "" if there are none, or that is unknown.
	Master string
}

// AbsentInterfaces returns the list entries that match none of the node's interfaces by
// which packets come or go: a part of another interface, such as the port of a bridge, is
// none. Their rules stay, because an interface may appear later.
func AbsentInterfaces(p nft.Policy, all []routes.Interface) (absent []AbsentInterface) {
	if len(p.Families) == 0 {
		return nil
	}
	for _, q := range p.Families[0].Questions { // the same in all families
		carries := routes.Interface.Sends
		if q.Asks == config.ReceivedOn {
			carries = routes.Interface.Receives
		}
		first := len(absent)
		for _, i := range q.Interfaces {
			master, found := find(all, i, carries)
			if !found && !slices.ContainsFunc(q.Interfaces, func(o config.Interface) bool { return o.Matches(master) }) {
				absent = append(absent, AbsentInterface{Interface: i, Key: q.Key, Master: master})
			}
		}
		for i := range absent[first:] {
			absent[first+i].Only = q.Outside && len(absent)-first == len(q.Interfaces)
		}
	}
	return absent
}

// receivesNothing reports whether the policy is for packets received on certain interfaces,
// of which the node has none. Without interfaces, nothing is known.
func receivesNothing(p nft.Policy, all []routes.Interface) bool {
	return len(all) > 0 && slices.ContainsFunc(AbsentInterfaces(p, all), func(i AbsentInterface) bool {
		return i.Only && i.Key == config.KeyMasqueradeSrcInterfaces
	})
}

// find reports whether an interface that matches an entry carries packets, and if none
// does, which other one does so for it.
func find(all []routes.Interface, i config.Interface, carries func(routes.Interface) bool) (master string, found bool) {
	for _, have := range all {
		switch {
		case !i.Matches(have.Name):
		case carries(have):
			return "", true
		case have.MasterKind != "openvswitch": // its ports have a data path as their master
			master = have.Master
		}
	}
	return master, false
}
