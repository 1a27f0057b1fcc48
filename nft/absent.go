package nft

import (
	"slices"

	"nft-masq-agent/config"
)

// An AbsentInterface is a list entry that matches no interface of the node.
type AbsentInterface struct {
	config.Interface
	Key string
	// Only means that the list restricts masquerading to its interfaces and
	// matches none: nothing is masqueraded.
	Only bool
}

// AbsentInterfaces returns the list entries that match none of the names. Their
// rules stay, because an interface may appear later.
func (p Policy) AbsentInterfaces(names []string) (absent []AbsentInterface) {
	if len(p.Families) == 0 {
		return nil
	}
	for _, q := range p.Families[0].Questions { // the same in all families
		matched := false
		first := len(absent)
		for _, i := range q.Interfaces {
			if slices.ContainsFunc(names, i.Matches) {
				matched = true
			} else {
				absent = append(absent, AbsentInterface{Interface: i, Key: q.Key})
			}
		}
		for i := range absent[first:] {
			absent[first+i].Only = q.Outside && !matched
		}
	}
	return absent
}
