package options

import (
	"errors"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Loaded is what the files say, and what becomes of it.
type Loaded struct {
	Files    []string // none: the defaults hold
	Config   config.Config
	Warnings []config.Problem
	Ruleset  nft.Ruleset
	// Lenient is what the older agents make of files that are rejected, nil if
	// they reject them too.
	Lenient *nft.Ruleset
}

// Load reads, parses and compiles the config. What is wrong with the files is
// an error of type [config.Problems].
func (o Options) Load() (Loaded, error) {
	sources, err := config.Read(o.Root + o.ConfigPath)
	if err != nil {
		return Loaded{}, o.withoutRoot(err)
	}
	var l Loaded
	for i := range sources {
		sources[i].Name = o.trimRoot(sources[i].Name)
		if !sources[i].Ignored {
			l.Files = append(l.Files, sources[i].Name)
		}
	}
	l.Config, l.Ruleset, l.Warnings, err = nft.Build(o.Defaults(), o.NFT(), sources...)
	if err != nil {
		if c, _, refused := config.Lenient(o.Defaults(), sources...); refused == nil {
			r := nft.Compile(c, o.NFT())
			l.Lenient = &r
		}
	}
	return l, err
}

func (o Options) trimRoot(name string) string {
	if o.Root == "" {
		return name
	}
	return strings.TrimPrefix(name, o.Root)
}

// withoutRoot names files in problems as the agent whose files they are does.
func (o Options) withoutRoot(err error) error {
	var problems config.Problems
	if errors.As(err, &problems) {
		for i := range problems {
			problems[i].Pos.File = o.trimRoot(problems[i].Pos.File)
		}
	}
	return err
}
