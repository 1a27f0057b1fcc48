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
	Files   []string // none: the built-in defaults apply
	Missing bool     // as also if all are empty
}

// Load reads, parses and compiles the config. Mistakes in the files are an error
// of type [config.Problems].
func Load(o cli.Options) (Loaded, error) {
	sources, note, err := sourcesOf(o)
	if err != nil {
		return Loaded{}, err
	}
	l := Build(o, sources)
	if note != nil {
		l.Problems = append(l.Problems, *note)
	}
	return l, l.Problems.Err()
}

// Build parses and compiles the content of files.
func Build(o cli.Options, sources []config.Source) Loaded {
	l := Loaded{Missing: config.Count(sources) == 0}
	for i := range sources {
		if !sources[i].Ignored {
			l.Files = append(l.Files, sources[i].Name)
		}
	}
	l.Built = nft.Build(o.Defaults, o.NFT(), sources...)
	return l
}

// Explain adds the warnings and notes to an error about the files.
func (l Loaded) Explain(err error) error {
	if errors.As(err, new(config.Problems)) {
		return append(l.Problems.Remarks(), config.ProblemsOf(err)...)
	}
	return err
}

// sourcesOf reads the files. note is a note about them.
func sourcesOf(o cli.Options) (sources []config.Source, note *config.Problem, err error) {
	if o.Input != nil && (o.ConfigPath == "-" || o.ConfigPath == "/dev/stdin") {
		sources, err = config.ReadFrom(o.Input, "standard input")
	} else {
		sources, err = config.Read(o.ConfigPath)
	}
	if errors.Is(err, config.ErrMissing) && !o.MustExist {
		err = nil
	}
	if err != nil {
		return nil, nil, err
	}
	if o.Manifest && len(sources) == 1 {
		sources[0], note, err = config.Unwrap(sources[0])
	}
	return sources, note, err
}
