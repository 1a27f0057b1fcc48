package nft

import (
	"slices"

	"nft-masq-agent/config"
)

// An AbsentInterface is an entry of a list that matches no interface of a node.
type AbsentInterface struct {
	config.Interface
	Key string
	// Only says that the list names the only interfaces, and matches none: nothing is
	// masqueraded.
	Only bool
}

// AbsentInterfaces returns the entries of lists that match none of the names. The
// rules stay: an interface may come.
func (p Policy) AbsentInterfaces(names []string) (absent []AbsentInterface) {
	if len(p.Families) == 0 {
		return nil
	}
	for _, q := range p.Families[0].Questions { // the families have the same
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
