package answer

import (
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/neighbors"
)

// Interfaces returns a problem for each list of interfaces because of which nothing is
// masqueraded on the node, and a note for each other entry without an interface.
func Interfaces(absent []neighbors.AbsentInterface) (found config.Problems) {
	for i, a := range absent {
		master := config.Printable(a.Master)
		switch {
		case a.Only && (i == 0 || absent[i-1].Key != a.Key):
			found = append(found, problem(config.Error, "interface-list-unmatched", nowhere, "%s",
				unmatchedList(a.Key, absent[i:])))
		case a.Only:
		case master != "":
			found = append(found, problem(config.Note, "interface-missing", a.Pos,
				"%s: %s is a part of %s here: list that instead", a.Key, a.Name, master))
		default:
			found = append(found, problem(config.Note, "interface-missing", a.Pos, "%s: this node has no interface %s", a.Key,
				a.Name))
		}
	}
	return found
}

// unmatchedList describes the list of a key, the first one of absent.
func unmatchedList(key string, absent []neighbors.AbsentInterface) string {
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
