package answer

import (
	"strings"

	"nft-masq-agent/nft"
)

// A Rendered is the output of render --format json: the ruleset for the kernel.
// Fields are only ever added.
type Rendered struct {
	Hash        string          `json:"hash"` // 8 hex digits, as in the log and in check
	Mode        string          `json:"mode"` // nftables or iptables-nft
	Families    []string        `json:"families"`
	RandomFully bool            `json:"randomFully"`
	ToPorts     []renderedPorts `json:"toPorts"`
	Tables      []renderedTable `json:"tables"`
}

// A renderedPorts is a range of ports, both ends included.
type renderedPorts struct {
	From uint16 `json:"from"`
	To   uint16 `json:"to"`
}

// A renderedTable is a table by family (inet, ip or ip6) and name. A shared table
// of mode iptables-nft contains only our rules.
type renderedTable struct {
	Family   string          `json:"family"`
	Name     string          `json:"name"`
	Counters []string        `json:"counters"`
	Sets     []renderedSet   `json:"sets"`
	Chains   []renderedChain `json:"chains"`
}

// A renderedSet is a set of sorted CIDRs; none of them covers another.
type renderedSet struct {
	Name    string   `json:"name"`
	Family  string   `json:"family"` // of the addresses: ipv4 or ipv6
	Comment string   `json:"comment"`
	CIDRs   []string `json:"cidrs"`
	// Map has the elements of a map, which has no CIDRs.
	Map []renderedMapping `json:"map,omitempty"`
}

// A renderedMapping is an element of a map.
type renderedMapping struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// A renderedChain is a chain with its rules in the syntax of the mode: nft's or
// iptables'. Base chains have a hook.
type renderedChain struct {
	Name  string        `json:"name"`
	Hook  *renderedHook `json:"hook,omitempty"`
	Rules []string      `json:"rules"`
}

// A renderedHook is the hook of a base chain.
type renderedHook struct {
	Type     string `json:"type"`
	Name     string `json:"name"`
	Priority int32  `json:"priority"`
}

// Render returns a ruleset for JSON output.
func Render(r nft.Ruleset, o nft.Options) Rendered {
	out := Rendered{
		Hash: r.Hash(), Mode: string(r.Mode()), RandomFully: o.RandomFully,
		Families: []string{}, ToPorts: []renderedPorts{}, Tables: []renderedTable{},
	}
	for _, f := range r.Policy.Families {
		out.Families = append(out.Families, strings.ToLower(familyName(f.IPv6)))
	}
	for _, p := range o.Ports {
		out.ToPorts = append(out.ToPorts, renderedPorts{p.Min, p.Max})
	}
	for _, t := range r.Tables {
		out.Tables = append(out.Tables, renderTable(t))
	}
	return out
}

// setSide is the suffix of a set's name in text: an update fills the other one,
// -b, first.
const setSide = "-a"

func renderTable(t nft.Table) renderedTable {
	out := renderedTable{
		Family: t.Family.String(), Name: t.Name,
		Counters: append([]string{}, t.Counters...), Sets: []renderedSet{}, Chains: []renderedChain{},
	}
	for _, s := range t.Sets {
		set := renderedSet{Name: s.Name + setSide, Family: strings.ToLower(familyName(s.IPv6)), Comment: s.Comment, CIDRs: []string{}}
		for _, p := range s.Prefixes {
			set.CIDRs = append(set.CIDRs, p.String())
		}
		for _, m := range s.Mappings {
			set.Map = append(set.Map, renderedMapping{m.Key.String(), m.Value.String()})
		}
		out.Sets = append(out.Sets, set)
	}
	for _, c := range t.Chains {
		chain := renderedChain{Name: c.Name, Rules: []string{}}
		if c.Hook != nil {
			chain.Hook = &renderedHook{Type: c.Hook.Type, Name: "postrouting", Priority: c.Hook.Priority}
		}
		for _, r := range c.Rules {
			chain.Rules = append(chain.Rules, r.String())
		}
		out.Chains = append(out.Chains, chain)
	}
	return out
}
