package main

import (
	"context"
	"flag"
	"strings"

	"nft-masq-agent/nft"
)

// Formats of render.
const (
	formatNFT       = "nft"
	formatIPTables  = "iptables"
	formatJSON      = "json"
	formatWinBridge = "win-bridge"
)

type renderFlags struct {
	*options
	format     string
	windowsAPI int // 0 where not given
}

func renderCommand() command {
	return command{
		name:  "render",
		about: "prints what run would install",
		details: "nft is for nft -f, which replaces the whole table by exactly this, without the promise of the agent that no " +
			"packet meets a wrong verdict meanwhile. iptables is for iptables-restore --noflush. json is for programs. " +
			"win-bridge is the policy for Windows nodes of the same cluster, to stand in the list policies of a win-bridge " +
			"configuration. Nothing is written to the kernel.",
		examples: []string{
			program + " render --config ./ip-masq-agent | nft -c -f -",
			program + " render --config ./ip-masq-agent --format win-bridge --windows-api 2",
		},
		flags: func(fs *flag.FlagSet) action {
			f := renderFlags{options: addPolicyFlags(fs)}
			addFlag(fs, &f.format, "format", "",
				"nft, iptables, json or win-bridge `FORMAT` (default nft, in mode iptables-nft iptables)",
				oneOf(formatNFT, formatIPTables, formatJSON, formatWinBridge))
			addFlag(fs, &f.windowsAPI, "windows-api", "",
				"`VERSION` of the API of win-bridge: 1 is HNS, 2 is HCN, as the apiVersion of its configuration says", parseWindowsAPI)
			return func(_ context.Context, _ []string, e environment) (int, error) { return f.render(e) }
		},
	}
}

func (f *renderFlags) render(e environment) (int, error) {
	if err := f.settle(); err != nil {
		return exitUsage, err
	}
	l, err := f.load()
	l.warn(e)
	if err != nil {
		return refuse(e, err)
	}
	text := l.ruleset.String()
	switch f.format {
	case formatJSON:
		text, err = encodeJSON(renderJSON(l.ruleset, f.nftOptions()))
	case formatWinBridge:
		text, err = f.winBridge(e, l)
	}
	if err != nil {
		return refuse(e, err)
	}
	return exitDone, write(e.stdout, text)
}

// settle makes flags that depend on one another agree.
func (f *renderFlags) settle() error {
	if f.format == "" {
		f.format = formatNFT
		if f.mode == nft.ModeIPTables {
			f.format = formatIPTables
		}
	}
	switch {
	case f.format != formatWinBridge && f.windowsAPI != 0:
		return usagef("--windows-api is for --format win-bridge")
	case f.format == formatWinBridge && f.windowsAPI == 0:
		return usagef("--format win-bridge needs --windows-api 1 or --windows-api 2")
	case f.format == formatWinBridge && len(f.ports) > 0:
		return usagef("--to-ports cannot be said in a policy of win-bridge")
	}
	switch f.format {
	case formatNFT, formatWinBridge:
		f.mode = nft.ModeNFTables
	case formatIPTables:
		f.mode = nft.ModeIPTables
	}
	return nil
}

// A renderedRuleset is the answer of render --format json: the ruleset as the
// kernel is to hold it. Fields are only ever added.
type renderedRuleset struct {
	Hash        string          `json:"hash"` // 8 hex digits, as in the log and in check
	Mode        string          `json:"mode"` // nftables or iptables-nft
	Families    []string        `json:"families"`
	RandomFully bool            `json:"randomFully"`
	ToPorts     []renderedPorts `json:"toPorts"`
	Tables      []renderedTable `json:"tables"`
}

// renderedPorts is a range of ports, both ends included.
type renderedPorts struct {
	From uint16 `json:"from"`
	To   uint16 `json:"to"`
}

// A renderedTable is a table by family (inet, ip or ip6) and name. Of a table
// that is shared with others, as in mode iptables-nft, only what is ours is
// listed.
type renderedTable struct {
	Family   string          `json:"family"`
	Name     string          `json:"name"`
	Counters []string        `json:"counters"`
	Sets     []renderedSet   `json:"sets"`
	Chains   []renderedChain `json:"chains"`
}

// A renderedSet is a set of CIDRs, sorted; none of them covers another.
type renderedSet struct {
	Name    string   `json:"name"`
	Family  string   `json:"family"` // of the addresses: ipv4 or ipv6
	Comment string   `json:"comment"`
	CIDRs   []string `json:"cidrs"`
}

// A renderedChain is a chain with its rules in the language of the mode: of nft
// or of iptables. Base chains have a hook.
type renderedChain struct {
	Name  string        `json:"name"`
	Hook  *renderedHook `json:"hook,omitempty"`
	Rules []string      `json:"rules"`
}

type renderedHook struct {
	Type     string `json:"type"`
	Name     string `json:"name"`
	Priority int32  `json:"priority"`
}

func renderJSON(r nft.Ruleset, o nft.Options) renderedRuleset {
	out := renderedRuleset{
		Hash: r.Hash(), Mode: string(r.Mode), RandomFully: o.RandomFully,
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

// setSide is behind the name of a set in text: an update fills the other one,
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
