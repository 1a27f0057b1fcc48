package health

import (
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/routes"
)

// An absentInterface is a list entry that matches no interface of the node.
type absentInterface struct {
	config.Interface
	Key string
	// Exclusive means that the list restricts masquerading to its interfaces and
	// matches none: nothing is masqueraded.
	Exclusive bool
	// Master is the interface to which the packets of those with a matching name belong,
	// because they are a part of it; "" if there are none, or that is unknown.
	Master string
}

// absentInterfaces returns the list entries that match none of the node's interfaces by
// which packets come or go: a part of another interface, such as the port of a bridge, is
// none. Their rules stay, because an interface may appear later.
func absentInterfaces(p nft.Policy, interfaces []routes.Interface) (absent []absentInterface) {
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
			master, found := find(interfaces, i, carries)
			if !found && !slices.ContainsFunc(q.Interfaces, func(o config.Interface) bool { return o.Matches(master) }) {
				absent = append(absent, absentInterface{Interface: i, Key: q.Key, Master: master})
			}
		}
		for i := range absent[first:] {
			absent[first+i].Exclusive = q.Outside && len(absent)-first == len(q.Interfaces)
		}
	}
	return absent
}

// find reports whether an interface that matches an entry carries packets, and if none
// does, which other one does so for it.
func find(links []routes.Interface, i config.Interface, carries func(routes.Interface) bool) (
	master string, found bool,
) {
	for _, have := range links {
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

// interfaces finds lists of interfaces because of which nothing is masqueraded on the node, and notes other entries
// without an interface.
func (f *Facts) interfaces(p nft.Policy) (found config.Problems) {
	absent := absentInterfaces(p, f.Links)
	for i, a := range absent {
		master := config.Printable(a.Master)
		switch {
		case a.Exclusive && (i == 0 || absent[i-1].Key != a.Key):
			found = append(found, problem(config.Error, InterfaceList, "", "%s", unmatchedList(a.Key, absent[i:])))
		case a.Exclusive:
		case master != "":
			found = append(found, missing(a, "%s: %s is a part of %s here: list that instead", a.Key, a.Name, master))
		default:
			found = append(found, missing(a, "%s: this node has no interface %s", a.Key, a.Name))
		}
	}
	return found
}

// unmatchedList describes the list of a key, the first one of absent.
func unmatchedList(key string, absent []absentInterface) string {
	var names, masters []string
	for _, a := range absent {
		if master := config.Printable(a.Master); a.Key == key {
			names = append(names, a.Name)
			if master != "" && !slices.Contains(masters, master) {
				masters = append(masters, master)
			}
		}
	}
	ask := "`ip route get ADDRESS` names the one by which packets leave"
	instead := ""
	if key == config.KeyMasqueradeSrcInterfaces {
		ask = "`ip route get POD` names the one on which a pod's packets arrive"
		instead = ", or use " + config.KeyMasqueradeSrcCIDRs
	}
	text := fmt.Sprintf("nothing is masqueraded: no packet passes an interface of %s (%s)", key, strings.Join(names, ", "))
	if len(masters) == 0 {
		return fmt.Sprintf("%s, because this node has none of them; %s: list that%s", text, ask, instead)
	}
	list := strings.Join(masters, ", ")
	return fmt.Sprintf("%s, because those of this node are parts of %s; list %s%s", text, list, list, instead)
}

// missing returns a note about an entry.
func missing(a absentInterface, format string, args ...any) config.Problem {
	note := problem(config.Note, InterfaceMissing, "", format, args...)
	note.Pos = a.Pos
	return note
}
