package config

import "fmt"

// lists returns the lists in the order of listKeys.
func (c *Config) lists() [4]*[]CIDR {
	return [...]*[]CIDR{&c.NonMasqueradeCIDRs, &c.ForceMasqueradeCIDRs, &c.NonMasqueradeSrcCIDRs, &c.MasqueradeSrcCIDRs}
}

// bools returns the booleans in the order of boolKeys.
func (c *Config) bools() [3]*bool {
	return [...]*bool{&c.MasqLinkLocal, &c.MasqLinkLocalIPv6, &c.EnableIPv6}
}

// join returns what the files say together, and adds to their problems those
// that show only then.
func join(d Defaults, files []*file) Config {
	c := Default(d)
	var limit *file // the first that gives cidrLimit
	var lists [4]bool
	var bools [3]bool
	interval := false
	for _, f := range files {
		for i, list := range c.lists() {
			if g := f.lists[i]; g.at != nil && !lists[i] {
				*list, lists[i] = g.value, true // not copied: it can be long
			} else {
				*list = append(*list, g.value...)
			}
		}
		for i, b := range c.bools() {
			if g := f.bools[i]; g.at != nil {
				*b = g.value || *b && bools[i]
				bools[i] = true
			}
		}
		if g := f.resyncInterval; g.at != nil && (!interval || g.value < c.ResyncInterval) {
			c.ResyncInterval, interval = g.value, true
		}
		if g := f.cidrLimit; g.at != nil && limit == nil {
			limit = f
		} else if g.at != nil && g.value != limit.cidrLimit.value {
			f.fail(g.at, "%s is %d here, but %d at %s", keyCIDRLimit, g.value, limit.cidrLimit.value, limit.position(limit.cidrLimit.at))
		}
	}
	if n := len(c.NonMasqueradeCIDRs); limit != nil && n > limit.cidrLimit.value {
		limit.fail(limit.cidrLimit.at, "%s is %d, but %s has %d entries", keyCIDRLimit, limit.cidrLimit.value, keyNonMasqueradeCIDRs, n)
	}
	warnOfLists(files, c)
	return c
}

// warnOfLists warns of an empty nonMasqueradeCIDRs, and, once per list and file,
// of IPv6 CIDRs while IPv6 is off.
func warnOfLists(files []*file, c Config) {
	for _, f := range files {
		if at := f.lists[0].at; at != nil && len(c.NonMasqueradeCIDRs) == 0 {
			f.warn(at, "%s is empty: not even the default ranges are exempt (to keep them, leave the key out)", keyNonMasqueradeCIDRs)
		}
		for i, key := range listKeys() {
			var first Position
			n := 0
			for _, cidr := range f.lists[i].value {
				if c.EnableIPv6 || !cidr.Addr().Is6() {
					continue
				}
				if n++; n == 1 {
					first = cidr.Pos
				}
			}
			if n > 0 {
				f.warnings = append(f.warnings, f.text.problem(first.Line, first.Col, fmt.Sprintf(
					"%s: IPv6 CIDRs (%d, the first here) have no effect while IPv6 is off: set %s or --enable-ipv6", key, n, keyEnableIPv6)))
			}
		}
	}
}
