package config

import "slices"

// Translations returns the rows of the keys that control the source address of a
// connection once the conditions have decided. They need mode nftables.
func Translations() []Row {
	return []Row{
		{
			Key: KeyEnforceNonMasquerade, explicit: true,
			Means: "no other program translates what pods send to exempt destinations",
			field: func(c *Config) any { return &c.Enforce },
		},
		SNATAddresses(),
	}
}

// SNATAddresses returns the row of that key.
func SNATAddresses() Row {
	return Row{
		Key: KeySNATAddresses, Set: "snat", addresses: true,
		Means: "masqueraded connections leave from one of these that the node has",
		field: func(c *Config) any { return &c.SNATAddresses },
	}
}

// NeedsNFTables returns a problem for each key of a config that only mode nftables
// supports.
func NeedsNFTables(c Config) (problems []Problem) {
	add := func(key string, at Position) {
		problems = append(problems, Problem{Pos: at, Msg: key + " needs mode nftables", Tolerated: true})
	}
	for _, row := range slices.Concat(Conditions(), Translations()) {
		if values := row.Values(c); row.View == "" && len(values) > 0 {
			add(row.Key, values[0].Pos)
		}
	}
	if c.StaleAt != nil {
		add(keyStaleConnections, *c.StaleAt)
	}
	return problems
}

// knowsPods reports whether the config identifies connections of a family that
// come from pods, as opposed to other containers or virtual machines on the node.
func (c Config) knowsPods(ipv6 bool) bool {
	return slices.ContainsFunc(Conditions(), func(row Row) bool {
		ofFamily := func(cidr CIDR) bool { return cidr.Addr().Is6() == ipv6 }
		return row.LimitsSources() && (len(row.Interfaces(c)) > 0 || slices.ContainsFunc(row.Entries(c), ofFamily))
	})
}

// checkEnforce checks that enforceNonMasquerade does not concern more than pods.
func (c *Config) checkEnforce(files []*file) {
	ipv4, ipv6 := c.knowsPods(false), c.knowsPods(true)
	for _, f := range files {
		const noEffect = "%s has no effect on %s: %s has no such entry"
		switch g := f.given[KeyEnforceNonMasquerade]; {
		case g.value != true:
		case !ipv4 && !ipv6:
			c.Enforce = nil
			f.failTolerated(g.at, "%s needs %s or %s: without them it would also turn off masquerading for containers and virtual machines of Docker and other programs",
				KeyEnforceNonMasquerade, KeyMasqueradeSrcCIDRs, KeyMasqueradeSrcInterfaces)
		case !ipv4:
			f.warn(g.at, noEffect, KeyEnforceNonMasquerade, "IPv4", KeyMasqueradeSrcCIDRs)
		case !ipv6 && c.EnableIPv6:
			f.warn(g.at, noEffect, KeyEnforceNonMasquerade, "IPv6", KeyMasqueradeSrcCIDRs)
		}
	}
}
