package answer

import (
	"fmt"
	"slices"
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
}

// NodeSNAT returns which of snatAddresses the node has, for each family with any.
func NodeSNAT(p nft.Policy) (reports []SNATReport) {
	for _, f := range p.Families {
		if len(f.SNAT.CIDRs) == 0 {
			continue
		}
		report := SNATReport{Family: familyKey(f.IPv6), Present: texts(f.SNAT.Present), Absent: []string{}}
		for _, c := range f.SNAT.CIDRs {
			if !slices.ContainsFunc(f.SNAT.Present, c.Contains) {
				report.Absent = append(report.Absent, c.Text())
			}
		}
		reports = append(reports, report)
	}
	return reports
}

func (r SNATReport) String() string {
	name := familyName(r.Family == "ipv6")
	if len(r.Present) == 0 {
		return fmt.Sprintf("Of the %s %s this node has none: connections are masqueraded with the address of the interface.",
			name, config.KeySNATAddresses)
	}
	text := name + " connections of pods leave from " + strings.Join(r.Present, ", ")
	if len(r.Absent) > 0 {
		text += "; not on this node: " + strings.Join(r.Absent, ", ")
	}
	return text
}
