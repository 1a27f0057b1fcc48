package health

import (
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/routes"
)

// interfaces finds lists of interfaces that match none by which packets come or go, so that nothing is masqueraded.
func (f *Facts) interfaces(p nft.Policy) (found config.Problems) {
	if len(p.Families) == 0 {
		return nil
	}
	for _, condition := range p.Families[0].Conditions { // the same in all families
		if condition.Outside && len(condition.Interfaces) > 0 && !f.passes(condition) {
			found = append(found, problem(config.Error, InterfaceList, remedy(condition),
				"nothing is masqueraded: no packet passes an interface of %s (%s)", condition.Key,
				strings.Join(config.Names(condition.Interfaces), ", ")))
		}
	}
	return found
}

// passes reports whether packets pass an interface that a condition lists: a part of another one, such as the port of
// a bridge, is none.
func (f *Facts) passes(condition nft.Condition) bool {
	carries := routes.Interface.Sends
	if condition.Asks == config.ReceivedOn {
		carries = routes.Interface.Receives
	}
	return slices.ContainsFunc(f.Links, func(link routes.Interface) bool {
		matches := func(i config.Interface) bool { return i.Matches(link.Name) }
		return carries(link) && slices.ContainsFunc(condition.Interfaces, matches)
	})
}
