package config

import (
	"cmp"
	"slices"
)

// A Translation is a key that controls the source address of a connection once
// the conditions have decided. It needs mode nftables.
type Translation struct {
	Key    string
	Means  string // description in check
	Values func(Config) []Value
	// Of a list of addresses: the name of its set, without family, and its field.
	Set   string
	cidrs func(*Config) *[]CIDR
}

// Translations returns the keys that control source address translation.
func Translations() []Translation {
	return []Translation{
		{
			Key: KeyEnforceNonMasquerade, Means: "no other program translates what pods send to exempt destinations",
			Values: func(c Config) []Value {
				if c.Enforce == nil {
					return nil
				}
				return []Value{{"true", *c.Enforce}}
			},
		},
		{
			Key: KeySNATAddresses, Set: "snat",
			Means: "masqueraded connections leave from one of these that the node has",
			Values: func(c Config) []Value {
				var out []Value
				for _, a := range c.SNATAddresses {
					out = append(out, Value{a.Text(), a.Pos})
				}
				return out
			},
			cidrs: func(c *Config) *[]CIDR { return &c.SNATAddresses },
		},
	}
}

// SNATAddresses returns the row of that key.
func SNATAddresses() Translation {
	all := Translations()
	return all[slices.IndexFunc(all, func(t Translation) bool { return t.Key == KeySNATAddresses })]
}

// A Setting is a key and the position at which a file first sets it.
type Setting struct {
	Key string
	Pos Position
}

// NeedsNFTables returns the keys of a config that only mode nftables supports.
func NeedsNFTables(c Config) []Setting {
	var all []Setting
	add := func(key string, values []Value) {
		if len(values) > 0 {
			all = append(all, Setting{key, values[0].Pos})
		}
	}
	for _, row := range Conditions() {
		if row.View == "" {
			add(row.Key, row.Values(c))
		}
	}
	for _, t := range Translations() {
		add(t.Key, t.Values(c))
	}
	if c.StaleAt != nil {
		all = append(all, Setting{keyStaleConnections, *c.StaleAt})
	}
	return all
}

// knowsPods reports whether the config identifies connections of a family that
// come from pods, as opposed to other containers or virtual machines on the node.
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

// LimitsSources reports whether the condition lists all sources that are
// masqueraded.
func (c Condition) LimitsSources() bool {
	return c.Outside && (c.Asks == SourceAddress || c.Asks == ReceivedOn)
}

// joinEnforce merges enforceNonMasquerade: one file that sets it is enough.
func joinEnforce(c *Config, files []*file) {
	for _, f := range files {
		g := f.bools[KeyEnforceNonMasquerade]
		if g.at == nil || !g.value {
			continue
		}
		without := func(ipv6 bool) bool { return (c.EnableIPv6 || !ipv6) && !c.knowsPods(ipv6) }
		switch at := f.position(g.at); {
		case !c.knowsPods(false) && !c.knowsPods(true):
			f.failTolerated(g.at, "%s needs %s or %s: without them it would also turn off masquerading for containers and virtual machines of Docker and other programs",
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
