package config

import "cmp"

// A Translation is a key about the source address of a connection once the
// conditions have decided. It needs mode nftables.
type Translation struct {
	Key   string
	Means string // in check
	Given func(Config) []Given
}

// Translations returns these keys.
func Translations() []Translation {
	return []Translation{
		{
			Key: KeyEnforceNonMasquerade, Means: "no other program translates what pods send to exempt destinations",
			Given: func(c Config) []Given {
				if c.Enforce == nil {
					return nil
				}
				return []Given{{"true", *c.Enforce}}
			},
		},
	}
}

// A Setting is a key and the place at which a file first gives it.
type Setting struct {
	Key string
	Pos Position
}

// NeedsNFTables returns the keys of a config that only mode nftables can do.
func NeedsNFTables(c Config) []Setting {
	var all []Setting
	add := func(key string, given []Given) {
		if len(given) > 0 {
			all = append(all, Setting{key, given[0].Pos})
		}
	}
	for _, row := range Conditions() {
		if row.View == "" {
			add(row.Key, row.Given(c))
		}
	}
	for _, t := range Translations() {
		add(t.Key, t.Given(c))
	}
	if c.StaleAt != nil {
		all = append(all, Setting{keyStaleConnections, *c.StaleAt})
	}
	return all
}

// knowsPods reports whether the config says which connections of a family come
// from pods, and not from containers or virtual machines of others on the node.
func (c Config) knowsPods(ipv6 bool) bool {
	for _, row := range Conditions() {
		if !row.LimitsSources() {
			continue
		}
		if len(row.Interfaces(c)) > 0 {
			return true
		}
		for _, cidr := range row.Entries(c) {
			if cidr.Addr().Is6() == ipv6 {
				return true
			}
		}
	}
	return false
}

// LimitsSources reports whether the condition names all sources that are
// masqueraded.
func (c Condition) LimitsSources() bool {
	return c.Outside && (c.Asks == SourceAddress || c.Asks == ReceivedOn)
}

// joinEnforce takes in enforceNonMasquerade: one file that sets it is enough.
func joinEnforce(c *Config, files []*file) {
	for _, f := range files {
		g := f.bools[KeyEnforceNonMasquerade]
		if g.at == nil || !g.value {
			continue
		}
		without := func(ipv6 bool) bool { return (c.EnableIPv6 || !ipv6) && !c.knowsPods(ipv6) }
		switch at := f.position(g.at); {
		case !c.knowsPods(false) && !c.knowsPods(true):
			f.passOver(g.at, "%s needs %s or %s: without them it would also turn off masquerading for containers and virtual machines of Docker and other programs",
				KeyEnforceNonMasquerade, KeyMasqueradeSrcCIDRs, KeyMasqueradeSrcInterfaces)
		default:
			c.Enforce = cmp.Or(c.Enforce, &at)
			if without(false) || without(true) {
				f.warn(g.at, "%s has no effect on %s: %s has no such entry", KeyEnforceNonMasquerade,
					map[bool]string{false: "IPv4", true: "IPv6"}[without(true)], KeyMasqueradeSrcCIDRs)
			}
		}
	}
}
