package config

import (
	"path/filepath"
	"slices"
)

// Parse reads all sources and merges them: lists are concatenated in source
// order, booleans are ORed, the shortest interval wins, and different values of
// cidrLimit are an error. Keys that no source sets keep their defaults. One bad
// source rejects all: the Config is then zero, and the error is [Problems].
// Warnings are returned either way.
func Parse(d Defaults, sources ...Source) (c Config, warnings []Problem, err error) {
	c, errors, warned := parse(d, sources)
	warnings = warned.all("warnings")
	if errors.total > 0 {
		return Config{}, warnings, Problems(errors.all("errors"))
	}
	return c, warnings, nil
}

// Lenient returns the Config that ip-masq-agent v2 would derive from sources that
// Parse rejects, and the mistakes that it ignores: misspelled, duplicate and
// conflicting keys, whatever follows the first document, intervals of zero or
// less, and invalid values of keys that only this agent has. Of duplicate keys
// the last one applies; an invalid value of a key that only this agent has is
// dropped. If anything else is wrong, the older agent rejects the sources, too:
// the Config is then zero, and the error is [Problems]. What only this agent
// accepts (IPv6 CIDRs while IPv6 is off, more than 64 CIDRs) is accepted here as
// well.
func Lenient(d Defaults, sources ...Source) (c Config, tolerated []Problem, err error) {
	c, errors, _ := parse(d, sources)
	if errors.refused {
		return Config{}, nil, Problems(errors.all("errors"))
	}
	return c, errors.all("errors"), nil
}

func parse(d Defaults, sources []Source) (c Config, errors, warnings report) {
	size := 0
	for _, s := range sources {
		if size += len(s.Data); size > maxSize {
			errors.add(tooLarge(Printable(s.Name), len(sources) > 1), maxErrors)
			return c, errors, warnings
		}
	}
	left := budget{nodes: maxNodes, folded: maxFolded}
	files := make([]*file, len(sources))
	for i, s := range sources {
		files[i] = readFile(d, s, &left)
	}
	c = join(d, files)
	if n := len(sources); n > 0 && !slices.ContainsFunc(sources, func(s Source) bool { return !s.Ignored }) {
		warnings.add(Problem{
			Pos: At(Printable(filepath.Dir(sources[0].Name)), 0, 0),
			Msg: "no file in this directory is read: the built-in defaults apply",
		}, maxWarnings)
	}
	for _, f := range files {
		errors.append(f.errors, maxErrors)
		warnings.append(f.warnings, maxWarnings)
	}
	return c, errors, warnings
}
