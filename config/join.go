package config

import (
	"slices"
	"time"

	"gopkg.in/yaml.v3"
)

// join merges the files, and adds the problems that only show up in the
// combination.
func join(d Defaults, files []*file) Config {
	c := Default(d)
	for _, row := range rows() {
		set := slices.DeleteFunc(slices.Clone(files), func(f *file) bool { return f.given[row.Key].at == nil })
		if len(set) > 0 {
			row.join(&c, set)
		}
	}
	c.checkEnforce(files)
	c.checkLists(files)
	return c
}

// join merges the key's values in the files that set it.
func (r Row) join(c *Config, files []*file) {
	position := func(f *file) *Position {
		at := f.position(f.given[r.Key].at)
		return &at
	}
	switch to := r.field(c).(type) {
	case *[]CIDR:
		if *to = files[0].given[r.Key].value.([]CIDR); len(files) > 1 { // not copied alone: it may be long
			*to = slices.Concat(values[[]CIDR](r, files)...)
		}
	case *[]Interface:
		*to = slices.Concat(values[[]Interface](r, files)...)
	case *bool:
		*to = slices.Contains(values[bool](r, files), true)
	case **Position:
		if all := values[bool](r, files); slices.Contains(all, true) == r.explicit {
			*to = position(files[slices.Index(all, r.explicit)])
		}
	case *time.Duration:
		*to = slices.Min(values[time.Duration](r, files))
	case *Stale:
		// The value that deletes the most connections wins.
		all := values[Stale](r, files)
		for _, most := range []Stale{StaleUDP, StaleAll} {
			if i := slices.Index(all, most); i >= 0 {
				c.StaleConnections, c.StaleAt = most, position(files[i])
			}
		}
	case *int:
		all := values[int](r, files)
		*to = all[0]
		for i, f := range files {
			if all[i] != *to {
				f.failUnlessJoined(f.given[r.Key].at, "%s is %d here, but %d at %s", r.Key, all[i], *to, position(files[0]))
			}
		}
		if n := len(c.NonMasqueradeCIDRs); n > *to {
			files[0].failUnlessJoined(files[0].given[r.Key].at, "%s is %d, but %s has %d entries", r.Key, *to, KeyNonMasqueradeCIDRs, n)
		}
	}
}

// values returns the key's values in the files that set it.
func values[T any](r Row, files []*file) []T {
	all := make([]T, len(files))
	for i, f := range files {
		all[i] = f.given[r.Key].value.(T)
	}
	return all
}

// checkLists warns about an empty nonMasqueradeCIDRs and, once per list and file,
// about IPv6 CIDRs while IPv6 is off.
func (c *Config) checkLists(files []*file) {
	for _, f := range files {
		if at := f.given[KeyNonMasqueradeCIDRs].at; at != nil && len(c.NonMasqueradeCIDRs) == 0 {
			f.warn(at, "%s is empty: not even the default ranges are exempt (to keep them, leave the key out)", KeyNonMasqueradeCIDRs)
		}
		for _, key := range Keys() {
			list, _ := f.given[key].value.([]CIDR)
			var first Position
			n := 0
			for _, cidr := range list {
				if c.EnableIPv6 || !cidr.Addr().Is6() {
					continue
				}
				if n++; n == 1 {
					first = cidr.Pos
				}
			}
			if n > 0 {
				f.warn(&yaml.Node{Line: int(first.Line), Column: int(first.Col)},
					"%s: IPv6 CIDRs (%d, the first here) have no effect while IPv6 is off: set %s or --enable-ipv6", key, n, keyEnableIPv6)
			}
		}
	}
}
