package config

import "fmt"

// join merges the files, and adds the problems that only show up in the
// combination.
func join(d Defaults, files []*file) Config {
	c := Default(d)
	var limit *file           // the first that sets cidrLimit
	seen := map[string]bool{} // keys of lists and booleans
	interval := false
	for _, f := range files {
		for _, row := range Conditions() {
			row.join(&c, f, files, seen)
		}
		for _, t := range Translations() {
			if t.cidrs != nil {
				*t.cidrs(&c) = append(*t.cidrs(&c), f.lists[t.Key].value...)
			}
		}
		for _, b := range boolKeys() {
			if g := f.bools[b.name]; g.at != nil {
				v := b.field(&c)
				*v = g.value || *v && seen[b.name]
				seen[b.name] = true
			}
		}
		if g := f.resyncInterval; g.at != nil && (!interval || g.value < c.ResyncInterval) {
			c.ResyncInterval, interval = g.value, true
		}
		// The value that deletes the most connections wins.
		if g := f.stale; g.value != StaleKeep && (g.value == StaleAll || c.StaleConnections == StaleKeep) {
			at := f.position(g.at)
			c.StaleConnections, c.StaleAt = g.value, &at
		}
		if g := f.cidrLimit; g.at != nil && limit == nil {
			limit = f
		} else if g.at != nil && g.value != limit.cidrLimit.value {
			f.failUnlessJoined(g.at, "%s is %d here, but %d at %s", keyCIDRLimit, g.value, limit.cidrLimit.value, limit.position(limit.cidrLimit.at))
		}
	}
	if n := len(c.NonMasqueradeCIDRs); limit != nil && n > limit.cidrLimit.value {
		limit.failUnlessJoined(limit.cidrLimit.at, "%s is %d, but %s has %d entries", keyCIDRLimit, limit.cidrLimit.value, KeyNonMasqueradeCIDRs, n)
	}
	joinEnforce(&c, files)
	warnOfLists(files, c)
	return c
}

// join adds the condition's values in one of the files.
func (c Condition) join(to *Config, f *file, files []*file, seen map[string]bool) {
	list, names, flag := f.lists[c.Key], f.names[c.Key], f.bools[c.Key]
	switch {
	case list.at != nil && !seen[c.Key]:
		*c.cidrs(to) = list.value // not copied: it may be long
	case list.at != nil:
		*c.cidrs(to) = append(grow(*c.cidrs(to), files, c.Key), list.value...)
	case names.at != nil:
		*c.interfaces(to) = append(*c.interfaces(to), names.value...)
	case flag.at != nil && flag.value:
		*c.off(to) = nil
	case flag.at != nil && !seen[c.Key]:
		at := f.position(flag.at)
		*c.off(to) = &at
	}
	seen[c.Key] = seen[c.Key] || list.at != nil || flag.at != nil
}

// grow returns the list of one or more files, with capacity for those of all.
func grow(list []CIDR, files []*file, key string) []CIDR {
	size := 0
	for _, f := range files {
		size += len(f.lists[key].value)
	}
	if cap(list) >= size {
		return list
	}
	return append(make([]CIDR, 0, size), list...)
}

// warnOfLists warns about an empty nonMasqueradeCIDRs and, once per list and
// file, about IPv6 CIDRs while IPv6 is off.
func warnOfLists(files []*file, c Config) {
	for _, f := range files {
		if at := f.lists[KeyNonMasqueradeCIDRs].at; at != nil && len(c.NonMasqueradeCIDRs) == 0 {
			f.warn(at, "%s is empty: not even the default ranges are exempt (to keep them, leave the key out)", KeyNonMasqueradeCIDRs)
		}
		for _, key := range Keys() {
			var first Position
			n := 0
			for _, cidr := range f.lists[key].value {
				if c.EnableIPv6 || !cidr.Addr().Is6() {
					continue
				}
				if n++; n == 1 {
					first = cidr.Pos
				}
			}
			if n > 0 {
				f.warnings.add(f.text.problem(int(first.Line), int(first.Col), fmt.Sprintf(
					"%s: IPv6 CIDRs (%d, the first here) have no effect while IPv6 is off: set %s or --enable-ipv6", key, n, keyEnableIPv6)), maxWarnings)
			}
		}
	}
}
