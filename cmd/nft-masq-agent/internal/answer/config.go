package answer

import (
	"errors"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Loaded is the content of the files, and the resulting ruleset.
type Loaded struct {
	nft.Built
	Files []string // that are not empty; none: the built-in defaults apply
}

// Load reads, parses and compiles the config. If the files are rejected, the error is of type [config.Problems]: all
// that is to be said about them.
func Load(o cli.Options) (l Loaded, err error) {
	sources, note, err := read(o)
	if err != nil {
		return l, err
	}
	l = Build(o, sources)
	l.Problems = append(l.Problems, note...)
	if l.Problems.Err() != nil {
		return l, l.Problems
	}
	return l, nil
}

// Build parses and compiles the content of files.
func Build(o cli.Options, sources []config.Source) Loaded {
	var l Loaded
	for i := range sources {
		if config.Count(sources[i:i+1]) > 0 {
			l.Files = append(l.Files, sources[i].Name)
		}
	}
	l.Built = nft.Build(o.Defaults, o.NFT(), sources...)
	return l
}

// read reads the files. note is about them.
func read(o cli.Options) (sources []config.Source, note config.Problems, err error) {
	if o.Input != nil && (o.ConfigPath == "-" || o.ConfigPath == "/dev/stdin") {
		sources, err = config.ReadFrom(o.Input, "standard input")
	} else {
		sources, err = config.Read(o.ConfigPath)
	}
	if errors.Is(err, config.ErrMissing) && !o.MustExist {
		err = nil
	}
	if err != nil || !o.Manifest || len(sources) != 1 {
		return sources, nil, err
	}
	unwrapped, found, err := config.Unwrap(sources[0])
	if found != nil {
		note = config.Problems{*found}
	}
	return []config.Source{unwrapped}, note, err
}

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
