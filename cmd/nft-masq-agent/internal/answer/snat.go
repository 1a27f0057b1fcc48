package answer

import (
	"fmt"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// NodeSNAT says for each family with snatAddresses or snatRules which of these addresses the node has.
func NodeSNAT(p nft.Policy) (lines []string) {
	for _, f := range p.Families {
		addresses := f.SNATAddresses()
		present := strings.Join(texts(addresses.Present), ", ")
		absent := strings.Join(config.Texts(addresses.Absent()), ", ")
		if present != "" {
			text := fmt.Sprintf("%s connections of pods leave from %s", familyName(f.IPv6), present)
			if absent != "" {
				text += "; not on this node: " + absent
			}
			lines = append(lines, text)
		} else if absent != "" {
			lines = append(lines, fmt.Sprintf(
				"This node has none of the %s %s: connections are masqueraded with the address of "+
					"the interface.", familyName(f.IPv6), config.KeySNATAddresses))
		}
		for _, r := range f.SNATRules() {
			if len(r.Present) == 0 {
				lines = append(lines, fmt.Sprintf("This node has no %s address of entry %d of %s (%s).",
					familyName(f.IPv6), r.Place,
					config.KeySNATRules, r.Pos))
			}
		}
	}
	return lines
}
