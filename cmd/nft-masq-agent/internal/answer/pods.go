package answer

import (
	"fmt"
	"net/netip"
	"strings"

	"nft-masq-agent/config"
)

// alike is what the answers for several sources have in common if they are the same: the
// reason, and the address unless it is the source's own.
func (x *Explanation) alike(src netip.Addr) string {
	sees := x.Sees
	if sees == src.String() {
		sees = ""
	}
	return strings.Join([]string{x.Why.Code, x.Why.Interface, sees, x.rule}, " ")
}

// OfPods completes the answer for any pod by those for each pod of this node: it is theirs if
// they get the same one, and else says which of them get which.
func (x *Explanation) OfPods(pods []netip.Addr, all []Explanation) Explanation {
	groups := map[string][]netip.Addr{}
	var first []int // of each group
	for i := range all {
		key := all[i].alike(pods[i])
		if groups[key] == nil {
			first = append(first, i)
		}
		groups[key] = append(groups[key], pods[i])
	}
	same := len(first) == 1
	switch {
	case len(first) == 0, same && (all[0].Why.Code == "unknown" || all[0].alike(pods[0]) == x.alike(netip.Addr{})):
		return *x
	case same:
		y := all[0]
		y.Add(config.Note, "pods", "This is the answer for %s and each other pod of this node, %d in all.", pods[0],
			len(pods))
		return y
	}
	x.Headline, x.Sees, x.Possible = fmt.Sprintf("What %s sees depends on the pod of this node.", x.Destination), "", nil
	for _, i := range first {
		of := groups[all[i].alike(pods[i])]
		by := either(all[i].rule == "", "", " ("+all[i].rule+")")
		x.Possible = append(x.Possible, fmt.Sprintf("%s: %s%s", addressList(of), all[i].Headline, by))
	}
	return *x
}
