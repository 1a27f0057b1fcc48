package answer

import (
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/node"
)

// Interfaces describes the entries of the config without an interface on the node: the
// lists because of which nothing is masqueraded, each with what to do, and other entries.
func Interfaces(absent []nft.AbsentInterface) (unmatched, others []string) {
	for i, a := range absent {
		switch {
		case !a.Only:
			text := fmt.Sprintf("%s: %s: this node has no interface %s", a.Pos, a.Key, a.Name)
			if master := config.Printable(a.Master); master != "" {
				text = fmt.Sprintf("%s: %s: %s is a part of %s here: list that instead", a.Pos, a.Key, a.Name, master)
			}
			others = append(others, text)
		case i == 0 || absent[i-1].Key != a.Key:
			unmatched = append(unmatched, unmatchedList(a.Key, absent[i:]))
		}
	}
	return unmatched, others
}

// SetInterfaces sets the report on the interfaces of the config.
func (r *Status) SetInterfaces(p nft.Policy, all []node.Interface) {
	unmatched, others := Interfaces(p.AbsentInterfaces(all))
	r.Unmatched, r.Notes = append(r.Unmatched, unmatched...), append(r.Notes, others...)
}

// unmatchedList describes the list of a key, the first one of absent.
func unmatchedList(key string, absent []nft.AbsentInterface) string {
	var names, masters []string
	for _, a := range absent {
		if master := config.Printable(a.Master); a.Key == key {
			names = append(names, a.Name)
			if master != "" && !slices.Contains(masters, master) {
				masters = append(masters, master)
			}
		}
	}
	ask, instead := "`ip route get ADDRESS` names the one by which packets leave", ""
	if key == config.KeyMasqueradeSrcInterfaces {
		ask = "`ip route get POD` names the one on which a pod's packets arrive"
		instead = ", or use " + config.KeyMasqueradeSrcCIDRs
	}
	text := fmt.Sprintf("nothing is masqueraded: no packet passes an interface of %s (%s)", key, strings.Join(names, ", "))
	if len(masters) == 0 {
		return fmt.Sprintf("%s, because this node has none of them; %s: list that%s", text, ask, instead)
	}
	on := strings.Join(masters, ", ")
	return fmt.Sprintf("%s, because those of this node are parts of %s; list %s%s", text, on, on, instead)
}
