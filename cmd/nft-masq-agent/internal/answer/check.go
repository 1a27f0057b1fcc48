package answer

import (
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Check is the output of check. With --strict a config with warnings is still accepted;
// only the exit code differs.
type Check struct {
	reply.Head
	// Config that was checked.
	Config Config `json:"config"`
	// Meaning of an accepted config.
	Meaning *meaning `json:"meaning,omitempty"`
}

// A meaning is what a valid config means.
type meaning struct {
	// RandomFully is false if source ports are kept where possible.
	RandomFully bool `json:"randomFully"`
	// ToPorts are the source ports, FIRST-LAST; absent if any.
	ToPorts string `json:"toPorts,omitempty"`
	// ResyncSeconds is the time between two complete comparisons of file and kernel.
	ResyncSeconds float64 `json:"resyncSeconds"`
	// MasqLinkLocal means that traffic to 169.254.0.0/16 is masqueraded.
	MasqLinkLocal bool `json:"masqLinkLocal"`
	// MasqLinkLocalIPv6 means that traffic to fe80::/10 is masqueraded.
	MasqLinkLocalIPv6 bool `json:"masqLinkLocalIPv6"`
	// EnableIPv6 is false if nothing of IPv6 is masqueraded.
	EnableIPv6 bool `json:"enableIPv6"`
	// Translation has the keys that control source address translation.
	Translation []givenReport `json:"translation,omitempty"`
	// Families are the lists of each address family.
	Families []familyReport `json:"families"`
}

// A givenReport is a value of a key and its position.
type givenReport struct {
	// Key of the config file.
	Key string `json:"key"`
	// Value of the key.
	Value string `json:"value"`
	origin
}

// A familyReport is the lists of an address family.
type familyReport struct {
	// Family of the lists.
	Family string `json:"family"`
	// Lists in the order in which they are asked.
	Lists []listReport `json:"lists"`
}

// A listReport is a list with entries, or the position of a key without a list, which is false.
type listReport struct {
	// Key of the config file.
	Key string `json:"key"`
	// CIDRs of the list.
	CIDRs []cidrReport `json:"cidrs"`
	// Place of a key without a list.
	Place config.Position `json:"place,omitzero"`
	// Interfaces are the entries of a list of names.
	Interfaces []interfaceReport `json:"interfaces,omitempty"`
}

// An interfaceReport is an entry of a list of interfaces.
type interfaceReport struct {
	// Name of an interface, or a prefix and *.
	Name string `json:"name"`
	origin
}

// A cidrReport is a CIDR and its origin.
type cidrReport struct {
	// CIDR as written in the file.
	CIDR string `json:"cidr"`
	origin
}

// NewCheck reports a config, which is not accepted if there is an error.
func NewCheck(h reply.Head, o options.Options, l Loaded, err error) Check {
	r := Check{Head: h, Config: NewConfig(o, l, err)}
	r.Take(config.ProblemsOf(err))
	r.Take(l.Problems.Remarks())
	if err == nil {
		r.Take(Lint(l.Ruleset.Policy, o.PodCIDRs))
	}
	return r
}

// SetMeaning sets what an accepted config means. The text is written from the policy,
// without it: it can be as large as the config.
func (r *Check) SetMeaning(l Loaded) {
	m := &meaning{
		RandomFully: l.Ruleset.Policy.RandomFully, ToPorts: strings.Join(texts(l.Ruleset.Policy.Ports), ","),
		ResyncSeconds: l.Config.ResyncInterval.Seconds(),
		MasqLinkLocal: l.Config.MasqLinkLocal, MasqLinkLocalIPv6: l.Config.MasqLinkLocalIPv6,
		EnableIPv6: l.Config.EnableIPv6,
	}
	for _, t := range config.Translations() {
		for _, given := range t.Values(l.Config) {
			m.Translation = append(m.Translation, givenReport{t.Key, given.Text, originOf(given.Pos)})
		}
	}
	for _, p := range l.Ruleset.Policy.Families {
		m.Families = append(m.Families, reportFamily(p))
	}
	r.Meaning = m
}

func reportFamily(f nft.FamilyPolicy) familyReport {
	r := familyReport{Family: familyKey(f.IPv6), Lists: []listReport{}}
	for _, q := range f.Questions {
		list := listReport{Key: q.Key, CIDRs: []cidrReport{}}
		if q.Asks == config.SentByNode {
			list.Place = q.At
		}
		for _, i := range q.Interfaces {
			list.Interfaces = append(list.Interfaces, interfaceReport{i.Name, originOf(i.Pos)})
		}
		for _, c := range q.CIDRs {
			list.CIDRs = append(list.CIDRs, reportCIDR(c))
		}
		r.Lists = append(r.Lists, list)
	}
	return r
}

func reportCIDR(c config.CIDR) cidrReport { return cidrReport{c.String(), originOf(c.Pos)} }
