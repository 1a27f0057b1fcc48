package answer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A snatReport lists which of snatAddresses a node has.
type snatReport struct {
	Family  string   `json:"family"`  // ipv4 or ipv6
	Present []string `json:"present"` // source addresses of connections from pods
	Absent  []string `json:"absent"`  // entries without an address of the node
}

// NodeSNAT describes which of snatAddresses the node has, with one line per
// family.
func NodeSNAT(p nft.Policy) (lines []string) {
	for _, f := range p.Families {
		switch {
		case len(f.SNAT.CIDRs) == 0:
		case len(f.SNAT.Present) == 0:
			lines = append(lines, missingSNAT(f.IPv6))
		default:
			lines = append(lines, fmt.Sprintf("Of the %s %s this node has %s.", familyName(f.IPv6), config.KeySNATAddresses, addressList(f.SNAT.Present)))
		}
	}
	return lines
}

func missingSNAT(ipv6 bool) string {
	return fmt.Sprintf("Of the %s %s this node has none: connections are masqueraded with the address of the interface.", familyName(ipv6), config.KeySNATAddresses)
}

// SetSNAT sets the report on source addresses.
func (r *Status) SetSNAT(p nft.Policy) {
	for _, f := range p.Families {
		if len(f.SNAT.CIDRs) == 0 {
			continue
		}
		report := snatReport{Family: strings.ToLower(familyName(f.IPv6)), Present: texts(f.SNAT.Present), Absent: []string{}}
		for _, c := range f.SNAT.CIDRs {
			if !slices.ContainsFunc(f.SNAT.Present, c.Contains) {
				report.Absent = append(report.Absent, c.Text())
			}
		}
		r.SNAT = append(r.SNAT, report)
	}
}

func (r snatReport) String() string {
	from := cmp.Or(strings.Join(r.Present, ", "), "the address of the interface")
	text := familyName(r.Family == "ipv6") + " connections of pods leave from " + from
	if len(r.Absent) > 0 {
		text += "; not on this node: " + strings.Join(r.Absent, ", ")
	}
	return text
}
