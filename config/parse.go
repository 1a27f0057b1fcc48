package config

import (
	"cmp"
	"slices"
)

// Parse reads all sources and joins them: lists in the order of the sources,
// booleans OR-ed, the shortest interval, and an error where two give different
// values of cidrLimit. Without a source, or where they say nothing, it returns
// the defaults. One bad source rejects all: the Config is then zero, and the
// error is [Problems]. The warnings stand beside either.
func Parse(d Defaults, sources ...Source) (c Config, warnings []Problem, err error) {
	c, errs, warnings := parse(d, sources)
	if len(errs) > 0 {
		return Config{}, warnings, errs
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
	c, errs, _ := parse(d, sources)
	for _, p := range errs {
		if !p.PassedOver {
			return Config{}, nil, errs
		}
	}
	return c, errs, nil
}

func parse(d Defaults, sources []Source) (c Config, errs Problems, warnings []Problem) {
	files := make([]*file, len(sources))
	for i, s := range sources {
		files[i] = readFile(d, s)
	}
	c = join(d, files)
	for _, f := range files {
		errs = append(errs, inOrder(f.errors)...)
		warnings = append(warnings, inOrder(f.warnings)...)
	}
	return c, errs, warnings
}

// inOrder sorts by place. What a mapping merged twice has told twice stays once.
func inOrder(problems []Problem) []Problem {
	slices.SortStableFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Pos.Line, b.Pos.Line), cmp.Compare(a.Pos.Col, b.Pos.Col))
	})
	return slices.Compact(problems)
}
