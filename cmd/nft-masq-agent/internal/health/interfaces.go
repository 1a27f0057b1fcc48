package health

import (
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/routes"
)

// interfaces finds lists of interfaces that match none by which packets come or go, so that nothing is masqueraded: a
// part of another interface, such as the port of a bridge, is none.
func (f *Facts) interfaces(p nft.Policy) (found config.Problems) {
	if len(p.Families) == 0 {
		return nil
	}
	for _, condition := range p.Families[0].Conditions { // the same in all families
		carries := routes.Interface.Sends
		if condition.Asks == config.ReceivedOn {
			carries = routes.Interface.Receives
		}
		if !condition.Outside || len(condition.Interfaces) == 0 {
			continue
		}
		matched := false
		var masters []string
		for _, link := range f.Links {
			listed := slices.ContainsFunc(condition.Interfaces, func(i config.Interface) bool { return i.Matches(link.Name) })
			master := config.Printable(link.Master)
			switch {
			case !listed:
			case carries(link):
				matched = true
			case link.MasterKind != "openvswitch" && !slices.Contains(masters, master): // its ports have a data path as theirs
				masters = append(masters, master)
			}
		}
		if !matched {
			found = append(found, problem(config.Error, InterfaceList, "", "%s", unmatchedList(condition, masters)))
		}
	}
	return found
}

// unmatchedList describes the list of a condition, and the interfaces that those with a matching name are parts of.
func unmatchedList(condition nft.Condition, masters []string) string {
	ask := "`ip route get ADDRESS` names the one by which packets leave"
	instead := ""
	if condition.Asks == config.ReceivedOn {
		ask = "`ip route get POD` names the one on which a pod's packets arrive"
		instead = ", or use " + config.KeyMasqueradeSrcCIDRs
	}
	text := fmt.Sprintf("nothing is masqueraded: no packet passes an interface of %s (%s)", condition.Key,
		strings.Join(config.Names(condition.Interfaces), ", "))
	if len(masters) == 0 {
		return fmt.Sprintf("%s, because this node has none of them; %s: list that%s", text, ask, instead)
	}
	list := strings.Join(masters, ", ")
	return fmt.Sprintf("%s, because those of this node are parts of %s; list %s%s", text, list, list, instead)
}
