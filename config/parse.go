package config

import (
	"cmp"
	"path/filepath"
	"slices"
)

// Parse reads all sources and joins them: lists in the order of the sources,
// booleans OR-ed, the shortest interval, and an error where two give different
// values of cidrLimit. Without a source, or where they say nothing, it returns
// the defaults. One bad source rejects all: the Config is then zero, and the
// error is [Problems]. The warnings stand beside either.
func Parse(d Defaults, sources ...Source) (c Config, warnings []Problem, err error) {
	c, errors, warned := parse(d, sources)
	warnings = warned.all("warnings")
	if errors.total > 0 {
		return Config{}, warnings, Problems(errors.all("errors"))
	}
	return c, warnings, nil
}

// Lenient returns the Config that ip-masq-agent v2 would make of sources that
// Parse refuses, and the mistakes that it ignores: misspelled, duplicate and
// conflicting keys, whatever follows the first document, intervals of zero or
// less, and invalid values of keys that only this agent has. The last duplicate
// of a key counts, an invalid value of a key of our own does not. If anything else
// is wrong, the older agent refuses the sources, too: the Config is then zero,
// and the error is [Problems]. What only this agent accepts (IPv6 CIDRs while
// IPv6 is off, more than 64 CIDRs) is accepted here as well.
func Lenient(d Defaults, sources ...Source) (c Config, passedOver []Problem, err error) {
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
	left := room{nodes: maxNodes, folded: maxFolded}
	files := make([]*file, len(sources))
	for i, s := range sources {
		files[i] = readFile(d, s, &left)
	}
	c = join(d, files)
	if n := len(sources); n > 0 && !slices.ContainsFunc(sources, func(s Source) bool { return !s.Ignored }) {
		warnings.add(Problem{
			Pos: Position{File: Printable(filepath.Dir(sources[0].Name))},
			Msg: "no file of this directory is read: the built-in defaults apply",
		}, maxWarnings)
	}
	for _, f := range files {
		errors.append(f.errors, maxErrors)
		warnings.append(f.warnings, maxWarnings)
	}
	return c, errors, warnings
}

// inOrder sorts by place. What a mapping merged twice has told twice stays once.
func inOrder(problems []Problem) []Problem {
	slices.SortStableFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Pos.Line, b.Pos.Line), cmp.Compare(a.Pos.Col, b.Pos.Col))
	})
	return slices.Compact(problems)
}
