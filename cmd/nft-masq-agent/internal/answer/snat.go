package answer

import (
	"fmt"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A SNATReport lists which of snatAddresses a node has.
type SNATReport struct {
	// Family of the addresses.
	Family string `json:"family"`
	// Present are the source addresses of connections from pods.
	Present []string `json:"present"`
	// Absent are the entries without an address of the node.
	Absent []string `json:"absent"`
	// Skipped are the entries of snatRules without an address of the node, with their places.
	Skipped []string `json:"skipped,omitempty"`
}

// NodeSNAT returns which of snatAddresses the node has, for each family with any.
func NodeSNAT(p nft.Policy) (reports []SNATReport) {
	for _, f := range p.Families {
		if len(f.SNAT.CIDRs)+len(f.SNATRules) == 0 {
			continue
		}
		report := SNATReport{
			Family: familyKey(f.IPv6), Present: texts(f.SNAT.Present),
			Absent: append([]string{}, config.Texts(f.SNAT.Absent())...),
		}
		for _, r := range f.SNATRules {
			if len(r.Present) == 0 {
				report.Skipped = append(report.Skipped, fmt.Sprintf("%d (%s)", r.Place, r.At))
			}
		}
		reports = append(reports, report)
	}
	return reports
}

func (r SNATReport) String() string {
	name := familyName(r.Family == "ipv6")
	skipped := ""
	if len(r.Skipped) > 0 {
		skipped = fmt.Sprintf(" This node has no address of these entries of %s: %s.", config.KeySNATRules,
			strings.Join(r.Skipped, ", "))
	}
	switch {
	case len(r.Present)+len(r.Absent) == 0: // there is no snatAddresses
		return fmt.Sprintf("%s connections of pods for which an entry of %s matches leave from its address.%s", name,
			config.KeySNATRules, skipped)
	case len(r.Present) == 0:
		return fmt.Sprintf("This node has none of the %s %s: connections are masqueraded with the address of the "+
			"interface.%s",
			name, config.KeySNATAddresses, skipped)
	}
	text := name + " connections of pods leave from " + strings.Join(r.Present, ", ")
	if len(r.Absent) > 0 {
		text += "; not on this node: " + strings.Join(r.Absent, ", ")
	}
	return text + strings.TrimSuffix(strings.Replace(skipped, " This", "; this", 1), ".")
}
