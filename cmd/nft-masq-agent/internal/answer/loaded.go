package answer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Loaded is the content of the files, and the resulting ruleset.
type Loaded struct {
	nft.Built
	Files []string // none: the built-in defaults apply
}

// Load reads, parses and compiles the config. Mistakes in the files are an error
// of type [config.Problems].
func Load(o options.Options) (Loaded, error) {
	sources, note, err := sourcesOf(o)
	if err != nil {
		return Loaded{}, err
	}
	var l Loaded
	for i := range sources {
		if !sources[i].Ignored {
			l.Files = append(l.Files, sources[i].Name)
		}
	}
	l.Built = nft.Build(o.Defaults, o.NFT(), sources...)
	if note != nil {
		l.Problems = append(l.Problems, *note)
	}
	return l, l.Problems.Err()
}

// Why adds the warnings and notes to an error about the files.
func (l Loaded) Why(err error) error {
	if errors.As(err, new(config.Problems)) {
		return append(l.Problems.Remarks(), l.Problems.Faults()...)
	}
	return err
}

// sourcesOf reads the files. note is a note about them.
func sourcesOf(o options.Options) (sources []config.Source, note *config.Problem, err error) {
	if o.Input != nil && (o.ConfigPath == "-" || o.ConfigPath == "/dev/stdin") {
		sources, err = config.ReadFrom(o.Input, "standard input")
	} else {
		sources, err = config.Read(o.ConfigPath)
	}
	if err != nil {
		return nil, nil, err
	}
	if len(sources) == 0 && o.MustExist {
		if _, err := os.Stat(o.ConfigPath); errors.Is(err, fs.ErrNotExist) {
			return nil, nil, fmt.Errorf("config %s: %w", config.Printable(o.ConfigPath), fs.ErrNotExist)
		}
	}
	if o.Input != nil && len(sources) == 1 {
		sources[0], note, err = config.Unwrap(sources[0])
	}
	return sources, note, err
}
