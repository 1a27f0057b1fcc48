package agent

import (
	"errors"
	"fmt"
	"slices"

	"nft-masq-agent/config"
)

// Files is the settled content of the config, or the error of reading it.
type Files struct {
	Sources []config.Source
	Err     error
}

// Count returns how many files there are that are not empty, or a negative number if that is not known.
func (f Files) Count() int {
	if !f.readable() {
		return -1
	}
	return config.Count(f.Sources)
}

// readable reports whether it is known which files there are.
func (f Files) readable() bool { return f.Err == nil || errors.Is(f.Err, config.ErrMissing) }

// missing returns why there is no config at a path; nil if there is one.
func (f Files) missing(path string) error {
	if f.Err != nil {
		return f.Err
	}
	if config.Count(f.Sources) > 0 {
		return nil
	}
	reason := "no file in it is read"
	if slices.ContainsFunc(f.Sources, func(s config.Source) bool { return !s.Ignored }) {
		reason = "the file is empty"
	}
	return fmt.Errorf("%s: %s", config.Printable(path), reason)
}
