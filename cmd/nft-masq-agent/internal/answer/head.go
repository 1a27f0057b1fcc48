package answer

import (
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/config"
)

// A Config is a policy and its origin.
type Config struct {
	// Path of the file or directory, - for standard input.
	Path string `json:"path"`
	// Hash of the policy, as in the comment of the last rule; empty if there is none.
	Hash string `json:"hash"`
	// Accepted is false for a file with errors or mistakes.
	Accepted bool `json:"accepted"`
	// Files that were found at the path. The built-in defaults apply if there are none.
	Files []string `json:"files,omitempty"`
	// Mode is nftables or iptables-nft.
	Mode string `json:"mode,omitempty"`
	// Chain of mode iptables-nft.
	Chain string `json:"chain,omitempty"`
	// Enforced is the hash of the policy in the kernel, if it is another one.
	Enforced string `json:"enforced,omitempty"`
}

// NewConfig describes the files, which are rejected if there is an error.
func NewConfig(o options.Options, l Loaded, err error) Config {
	c := Config{
		Path: o.ConfigPath, Accepted: err == nil, Files: l.Files, Mode: string(o.Mode),
		Chain: o.NFT().Layout.Chain(),
	}
	if err == nil && l.Ruleset != nil {
		c.Hash = l.Ruleset.Hash()
	}
	return c
}

// An Agent is a running agent.
type Agent struct {
	// PID is the agent's process, as the command sees it.
	PID int `json:"pid"`
	// Flags of the agent.
	Flags []string `json:"flags"`
	// Policy that the agent enforces; absent if it does not answer.
	Policy *report.Policy `json:"policy,omitempty"`
}

// An origin is the place in a file, or that there is none.
type origin struct {
	// Place in a file.
	Place config.Position `json:"place,omitzero"`
	// Default is true for what does not come from a file.
	Default bool `json:"default,omitempty"`
}

func originOf(p config.Position) origin { return origin{p, p == nowhere} }

// A Rule is a rule of another program, or in an explanation one of this agent.
type Rule struct {
	// Table is family and name.
	Table string `json:"table"`
	// Chain of the rule.
	Chain string `json:"chain"`
	// Handle of the rule; 0 for the policy of the chain.
	Handle uint64 `json:"handle"`
	// Priority of the base chain from which the rule is reached.
	Priority int32 `json:"priority"`
	// Packets that the rule has counted, if it has a counter.
	Packets *uint64 `json:"packets,omitempty"`
	// Rule as text.
	Rule string `json:"rule"`
	// Kind is what the rule does: masquerades, accepts, translates, untracks, writes (a source
	// address, without NAT), drops, or keeps (this agent, with enforceNonMasquerade).
	Kind string `json:"kind"`
	// Own is true for a rule of this agent.
	Own bool `json:"own,omitempty"`
	// Effect in status: masquerades-exempt (traffic that the config exempts), overrides (the config,
	// for traffic that it masquerades), prevented (it would masquerade exempt traffic without
	// enforceNonMasquerade), accepted (by --accept-foreign), or not-of-pods (it masquerades exempt
	// traffic, but of no pod).
	Effect string `json:"effect,omitempty"`
	// Sees is the source address that the destination sees if this rule applies.
	Sees string `json:"sees,omitempty"`
	// Via are the rules that lead from the base chain to this one.
	Via []string `json:"via,omitempty"`
	// Why the rule is listed.
	Why *RuleWhy `json:"why,omitempty"`
}

// A RuleWhy is why a rule is listed.
type RuleWhy struct {
	// Code is the kind of the rule.
	Code string `json:"code"`
	// Text names the traffic and the conditions.
	Text string `json:"text"`
}

// place returns the location as nft delete rule expects it.
func (r Rule) place() string {
	if r.Handle == 0 {
		return r.Table + " " + r.Chain
	}
	return fmt.Sprintf("%s %s handle %d", r.Table, r.Chain, r.Handle)
}

func (r Rule) String() string {
	if r.Own {
		return "this agent"
	}
	text := fmt.Sprintf("%s (priority %d", r.place(), r.Priority)
	if r.Packets != nil {
		text += ", " + Plural(int(*r.Packets), "packet")
	}
	text += "): " + r.Rule
	if r.Why != nil {
		text += " (" + r.Why.Text + ")"
	}
	return text
}
