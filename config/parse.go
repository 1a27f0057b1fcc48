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
	files := make([]*file, len(sources))
	for i, s := range sources {
		files[i] = readFile(s)
	}
	c = join(d, files)
	var errs Problems
	for _, f := range files {
		errs = append(errs, inOrder(f.errors)...)
		warnings = append(warnings, inOrder(f.warnings)...)
	}
	if len(errs) > 0 {
		return Config{}, warnings, errs
	}
	return c, warnings, nil
}

// inOrder sorts by place. What a mapping merged twice has told twice stays once.
func inOrder(problems []Problem) []Problem {
	slices.SortStableFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Pos.Line, b.Pos.Line), cmp.Compare(a.Pos.Col, b.Pos.Col))
	})
	return slices.Compact(problems)
}
