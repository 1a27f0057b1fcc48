package answer

import (
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Check is the output of check -o json. Fields are only ever added. With
// --strict a config with warnings is still valid; only the exit code differs.
type Check struct {
	Valid    bool            `json:"valid"`
	Config   string          `json:"config"` // the requested path
	Files    []string        `json:"files"`  // the files found there; none: the built-in defaults apply
	Errors   config.Problems `json:"errors"`
	Warnings config.Problems `json:"warnings"`
	Notes    config.Problems `json:"notes"`
	Meaning  *meaning        `json:"meaning,omitempty"` // of a valid config
}

// A meaning is what a valid config means.
type meaning struct {
	Hash              string         `json:"hash"`
	Mode              string         `json:"mode"`
	Chain             string         `json:"chain,omitempty"` // of mode iptables-nft
	RandomFully       bool           `json:"randomFully"`
	ToPorts           string         `json:"toPorts,omitempty"`
	ResyncSeconds     float64        `json:"resyncSeconds"`
	MasqLinkLocal     bool           `json:"masqLinkLocal"`
	MasqLinkLocalIPv6 bool           `json:"masqLinkLocalIPv6"`
	EnableIPv6        bool           `json:"enableIPv6"`
	Translation       []givenReport  `json:"translation,omitempty"` // keys that control source address translation
	Families          []familyReport `json:"families"`
}

// A givenReport is a value of a key and its position.
type givenReport struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	Place string `json:"place"`
}

// A familyReport is the lists of "ipv4" or "ipv6" in evaluation order.
type familyReport struct {
	Family string       `json:"family"`
	Lists  []listReport `json:"lists"`
}

// A listReport is a list with entries, by its key, or the position of a key
// without a list, which is false.
type listReport struct {
	Key     string          `json:"key"`
	CIDRs   []cidrReport    `json:"cidrs"`
	Covered []coveredReport `json:"covered,omitempty"` // dropped
	Place   string          `json:"place,omitempty"`
	// Interfaces are the entries of a list of names.
	Interfaces []interfaceReport `json:"interfaces,omitempty"`
}

// An interfaceReport is the name of an interface, or a prefix and "*", and its position.
type interfaceReport struct {
	Name  string `json:"name"`
	Place string `json:"place"`
}

// A cidrReport is a CIDR and its origin: FILE:LINE:COL, or a description if it is
// not from a file.
type cidrReport struct {
	CIDR  string `json:"cidr"`
	Place string `json:"place"`
}

// A coveredReport is a dropped CIDR, and the one that covers it.
type coveredReport struct {
	cidrReport
	By cidrReport `json:"by"`
}

// NewCheck reports a config, which is not valid if there is an error.
func NewCheck(o options.Options, l options.Loaded, found config.Problems, err error) Check {
	r := Check{
		Valid: err == nil, Config: o.ConfigPath, Files: append([]string{}, l.Files...),
		Errors: config.ProblemsOf(err), Warnings: found.Of(config.Warning), Notes: found.Of(config.Note),
	}
	if r.Valid {
		r.Meaning = newMeaning(o.NFT(), l)
	}
	return r
}

func newMeaning(o nft.Options, l options.Loaded) *meaning {
	m := &meaning{
		Hash: l.Ruleset.Hash(), Mode: string(o.Layout.Mode()), Chain: l.Ruleset.Chain(),
		RandomFully: l.Ruleset.Policy.RandomFully, ToPorts: strings.Join(texts(l.Ruleset.Policy.Ports), ","),
		ResyncSeconds: l.Config.ResyncInterval.Seconds(),
		MasqLinkLocal: l.Config.MasqLinkLocal, MasqLinkLocalIPv6: l.Config.MasqLinkLocalIPv6,
		EnableIPv6: l.Config.EnableIPv6,
	}
	for _, t := range config.Translations() {
		for _, given := range t.Values(l.Config) {
			m.Translation = append(m.Translation, givenReport{t.Key, given.Text, given.Pos.String()})
		}
	}
	for _, p := range l.Ruleset.Policy.Families {
		m.Families = append(m.Families, reportFamily(p))
	}
	return m
}

func reportFamily(f nft.FamilyPolicy) familyReport {
	r := familyReport{Family: familyKey(f.IPv6), Lists: []listReport{}}
	for _, q := range f.Questions {
		list := listReport{Key: q.Key, CIDRs: []cidrReport{}}
		if q.Set == "" && !q.HasInterfaces() {
			list.Place = q.At.String()
		}
		for _, i := range q.Interfaces {
			list.Interfaces = append(list.Interfaces, interfaceReport{i.Name, i.Pos.String()})
		}
		for _, c := range q.CIDRs {
			list.CIDRs = append(list.CIDRs, reportCIDR(c))
		}
		for c, by := range q.Covered() {
			list.Covered = append(list.Covered, coveredReport{reportCIDR(c), reportCIDR(by)})
		}
		r.Lists = append(r.Lists, list)
	}
	return r
}

func reportCIDR(c config.CIDR) cidrReport { return cidrReport{c.String(), place(c)} }
