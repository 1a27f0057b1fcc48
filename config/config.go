package config

import (
	"net/netip"
	"time"
)

// A CIDR is a network from a config file: masked, without a zone, and never
// IPv4-mapped.
type CIDR struct {
	netip.Prefix
	Pos Position
}

// Text is the CIDR, or the address alone if it holds just one.
func (c CIDR) Text() string {
	if c.IsSingleIP() {
		return c.Addr().String()
	}
	return c.String()
}

// A Config is the content of the files, completed by the defaults. Lists are as
// written: in file order, with duplicates.
type Config struct {
	NonMasqueradeCIDRs    []CIDR
	ForceMasqueradeCIDRs  []CIDR
	NonMasqueradeSrcCIDRs []CIDR
	MasqueradeSrcCIDRs    []CIDR
	ExemptHost            *Position // position of masqueradeHost: false; nil if true

	MasqueradeSrcInterfaces    []Interface
	MasqueradeOutInterfaces    []Interface
	NonMasqueradeOutInterfaces []Interface

	Enforce       *Position // position of enforceNonMasquerade: true; nil if false
	SNATAddresses []CIDR    // a single address is a CIDR of its full length

	MasqLinkLocal     bool
	MasqLinkLocalIPv6 bool
	EnableIPv6        bool

	ResyncInterval time.Duration // from a file: 1s to 24h

	StaleConnections Stale
	StaleAt          *Position // its position; nil if no file sets it
}

// Stale selects the connections to delete if their translation contradicts a
// changed policy.
type Stale string

// Values of staleConnections.
const (
	StaleKeep Stale = ""    // "keep" in a file: delete none
	StaleUDP  Stale = "udp" // delete UDP connections
	StaleAll  Stale = "all" // delete connections of all protocols
)

// A resyncInterval outside these bounds is clamped to the nearer one.
const (
	shortestInterval = time.Second
	longestInterval  = 24 * time.Hour
)

// A Condition is a row of the policy table: a key of the config file, what it
// checks in the first packet of a connection, and the resulting verdict.
type Condition struct {
	Key        string
	Asks       Subject
	Outside    bool   // matches whatever is not in the list
	Masquerade bool   // the verdict if it matches; false: exempt
	Set        string // name of the nftables set for its list, without the family suffix
	Means      string // description in check, and the set's comment
	View       string // comment of its rules in mode iptables-nft; empty: mode nftables only
	WinBridge  bool   // win-bridge can express it

	// Exactly one of these is set: a list of CIDRs, a list of interfaces, or the
	// position of an explicit false.
	cidrs      func(*Config) *[]CIDR
	interfaces func(*Config) *[]Interface
	off        func(*Config) **Position
}

// A Subject is the property of a packet that a condition checks.
type Subject string

// The subjects.
const (
	SourceAddress      Subject = "source"
	DestinationAddress Subject = "destination"
	SentByNode         Subject = "node" // the source is an address of this node
	ReceivedOn         Subject = "in-interface"
	LeavingBy          Subject = "out-interface"
)

// Conditions returns the policy table in evaluation order; the first condition
// that matches decides. No other code lists the conditions: names, texts and
// rules are derived from these rows.
func Conditions() []Condition {
	return []Condition{
		{
			Key: "masqueradeHost", Asks: SentByNode,
			Means: "what this node itself sends keeps its address",
			off:   func(c *Config) **Position { return &c.ExemptHost },
		},
		{
			Key: KeyMasqueradeSrcInterfaces, Asks: ReceivedOn, Outside: true,
			Means:      "only what was received on one of these interfaces is masqueraded",
			interfaces: func(c *Config) *[]Interface { return &c.MasqueradeSrcInterfaces },
		},
		{
			Key: KeyMasqueradeSrcCIDRs, Asks: SourceAddress, Outside: true, Set: "masq-src",
			Means: "the only sources that are masqueraded",
			View:  "only traffic of these sources should be subject to MASQUERADE",
			cidrs: func(c *Config) *[]CIDR { return &c.MasqueradeSrcCIDRs },
		},
		{
			Key: KeyNonMasqueradeSrcCIDRs, Asks: SourceAddress, Set: "non-masq-src",
			Means: "sources that keep their own address",
			View:  "traffic of this source should not be subject to MASQUERADE",
			cidrs: func(c *Config) *[]CIDR { return &c.NonMasqueradeSrcCIDRs },
		},
		{
			Key: "nonMasqueradeOutInterfaces", Asks: LeavingBy,
			Means:      "what leaves by one of these interfaces keeps its address",
			interfaces: func(c *Config) *[]Interface { return &c.NonMasqueradeOutInterfaces },
		},
		{
			Key: "masqueradeOutInterfaces", Asks: LeavingBy, Outside: true,
			Means:      "only what leaves by one of these interfaces is masqueraded",
			interfaces: func(c *Config) *[]Interface { return &c.MasqueradeOutInterfaces },
		},
		{
			Key: KeyForceMasqueradeCIDRs, Asks: DestinationAddress, Masquerade: true, Set: "force-masq",
			Means: "destinations that always see the node's address",
			View:  "traffic to this destination should always be subject to MASQUERADE",
			cidrs: func(c *Config) *[]CIDR { return &c.ForceMasqueradeCIDRs },
		},
		{
			Key: KeyNonMasqueradeCIDRs, Asks: DestinationAddress, Set: "non-masq", WinBridge: true,
			Means: "destinations that see the pod's own address",
			View:  "cluster-local traffic should not be subject to MASQUERADE",
			cidrs: func(c *Config) *[]CIDR { return &c.NonMasqueradeCIDRs },
		},
	}
}

// Question describes in words what the condition checks.
func (c Condition) Question() string {
	switch c.Asks {
	case SentByNode:
		return "from an address of this node"
	case ReceivedOn:
		return "received on one of " + c.Key
	case LeavingBy:
		return "leaving by one of " + c.Key
	}
	return string(c.Asks) + " in " + c.Key
}

// Entries returns the condition's CIDRs in a config.
func (c Condition) Entries(from Config) []CIDR {
	if c.cidrs == nil {
		return nil
	}
	return *c.cidrs(&from)
}

// Interfaces returns the condition's interfaces in a config.
func (c Condition) Interfaces(from Config) []Interface {
	if c.interfaces == nil {
		return nil
	}
	return *c.interfaces(&from)
}

// HasInterfaces reports whether the condition takes a list of interfaces.
func (c Condition) HasInterfaces() bool { return c.interfaces != nil }

// Off returns the position at which a config sets the condition to false, or nil.
func (c Condition) Off(from Config) *Position {
	if c.off == nil {
		return nil
	}
	return *c.off(&from)
}

// A Value is one value of a condition in a config: an entry of its list, or
// false.
type Value struct {
	Text string
	Pos  Position
}

// Values returns the condition's values in a config.
func (c Condition) Values(from Config) []Value {
	if at := c.Off(from); at != nil {
		return []Value{{"false", *at}}
	}
	var out []Value
	for _, entry := range c.Entries(from) {
		out = append(out, Value{entry.String(), entry.Pos})
	}
	for _, entry := range c.Interfaces(from) {
		out = append(out, Value{entry.Name, entry.Pos})
	}
	return out
}

// Defaults are the values that command-line flags set for keys missing from the file.
type Defaults struct {
	AllReservedRanges bool // exempt all reserved ranges, not only those of RFC 1918
	EnableIPv6        bool
	ResyncInterval    time.Duration // 0 means 60s
}

// Default returns the Config that applies without a file.
func Default(d Defaults) Config {
	c := Config{
		NonMasqueradeCIDRs: defaultCIDRs(d.AllReservedRanges),
		EnableIPv6:         d.EnableIPv6,
		ResyncInterval:     d.ResyncInterval,
	}
	if c.ResyncInterval == 0 {
		c.ResyncInterval = time.Minute
	}
	return c
}

// defaultCIDRs returns the RFC 1918 ranges and, if all is set, the other reserved
// ranges that the older agents exempt with --nomasq-all-reserved-ranges.
func defaultCIDRs(all bool) []CIDR {
	ranges := []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}
	if all {
		ranges = append(ranges, "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24",
			"198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")
	}
	cidrs := make([]CIDR, len(ranges))
	for i, r := range ranges {
		cidrs[i].Prefix = netip.MustParsePrefix(r)
	}
	return cidrs
}
