package answer

import (
	"fmt"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// An Entry is a value of a key of a policy, such as a CIDR of a list.
type Entry struct {
	// Key of the config file.
	Key string `json:"key"`
	// Family that the entry is of; absent for a key of both.
	Family string `json:"family,omitempty"`
	// Value of the entry.
	Value string `json:"value"`
	// Place in a file; absent for a built-in default.
	Place config.Position `json:"place,omitzero"`

	title string // of its list
}

// entries returns the entries of a policy: first those that control source address translation, then the
// conditions of each family in the order in which they are asked.
func entries(p nft.Policy) (list []Entry) {
	titles := map[string]string{}
	for _, row := range config.Translations() {
		titles[row.Key] = row.Key + ": " + row.Means
	}
	add := func(key, family, value string, place config.Position) {
		list = append(list, Entry{key, family, value, place, titles[key]})
	}
	for _, f := range p.Families {
		for _, c := range f.SNATAddresses().Addresses.CIDRs {
			add(config.KeySNATAddresses, nft.FamilyKey(f.IPv6), c.Text(), c.Pos)
		}
	}
	for _, f := range p.Families {
		for _, r := range f.SNATRules() {
			add(config.KeySNATRules, nft.FamilyKey(f.IPv6), r.String(), r.Pos)
		}
	}
	if p.Enforce != nil {
		value := fmt.Sprintf("true, except for marks %v", p.Enforce.Marks)
		add(config.KeyEnforceNonMasquerade, "", value, p.Enforce.Pos)
	}
	for _, f := range p.Families {
		family := nft.FamilyKey(f.IPv6)
		for _, condition := range f.Conditions {
			titles[condition.Key] = nft.FamilyName(f.IPv6) + " " + condition.Key + ": " + condition.Means
			if condition.Asks == config.SentByNode {
				add(condition.Key, family, "false", condition.Pos)
			}
			for _, i := range condition.Interfaces {
				add(condition.Key, family, i.Name, i.Pos)
			}
			list = slices.Grow(list, len(condition.CIDRs)) // there can be hundreds of thousands
			for _, c := range condition.CIDRs {
				add(condition.Key, family, c.String(), c.Pos)
			}
		}
	}
	return list
}

// entryName names an entry of snatRules, or snatAddresses, which is one without conditions.
func entryName(r nft.SNATRule) string {
	if r.Number == 0 {
		return config.KeySNATAddresses
	}
	return fmt.Sprintf("entry %d of %s", r.Number, config.KeySNATRules)
}
