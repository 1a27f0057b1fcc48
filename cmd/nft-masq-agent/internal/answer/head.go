package answer

import (
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
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
func NewConfig(o cli.Options, l Loaded, err error) Config {
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
	Policy *running.Policy `json:"policy,omitempty"`
}
