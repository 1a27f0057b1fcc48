package config

import (
	"net/netip"
	"time"
)

// A CIDR is a network as it stands in a file: masked, without zone, and never
// an IPv4-mapped one.
type CIDR struct {
	netip.Prefix
	Pos Position
}

// A Config is what the files say, completed by the defaults. The lists are as
// written: in file order, duplicates kept.
type Config struct {
	NonMasqueradeCIDRs    []CIDR
	ForceMasqueradeCIDRs  []CIDR
	NonMasqueradeSrcCIDRs []CIDR
	MasqueradeSrcCIDRs    []CIDR
	ExemptHost            *Position // where masqueradeHost is false; nil: it is true

	MasqueradeSrcInterfaces    []Interface
	MasqueradeOutInterfaces    []Interface
	NonMasqueradeOutInterfaces []Interface

	Enforce *Position // where enforceNonMasquerade is true; nil: it is false

	MasqLinkLocal     bool
	MasqLinkLocalIPv6 bool
	EnableIPv6        bool

	ResyncInterval time.Duration // of a file: from 1s to 24h

	StaleConnections Stale
	StaleAt          *Position // where a file says so
}

// Stale says what happens to connections whose translation contradicts a changed
// policy.
type Stale string

// What happens to them.
const (
	StaleKeep Stale = ""    // in a file: keep
	StaleUDP  Stale = "udp" // the kernel forgets those of UDP
	StaleAll  Stale = "all" // and all others
)

// A file's resyncInterval outside these bounds is taken as the nearer bound.
const (
	shortestInterval = time.Second
	longestInterval  = 24 * time.Hour
)

// A Condition is a row of the policy's table: a key of the file, what it asks
// about the first packet of a connection, and what the answer is worth.
type Condition struct {
	Key        string
	Asks       Subject
	Outside    bool   // it decides for what its list does not hold
	Masquerade bool   // the verdict if it decides; otherwise: exempt
	Set        string // the name of the set of its list, without family
	Means      string // in check, and as the comment of the set
	View       string // the comment of its rules in mode iptables-nft; none: it needs mode nftables
	WinBridge  bool   // a policy of win-bridge can express it

	// Its value: a list of CIDRs or of interfaces, or where the file sets it to false.
	cidrs      func(*Config) *[]CIDR
	interfaces func(*Config) *[]Interface
	off        func(*Config) **Position
}

// A Subject is what a condition looks at.
type Subject string

// The subjects.
const (
	SourceAddress      Subject = "source"
	DestinationAddress Subject = "destination"
	SentByNode         Subject = "node" // the source is an address of this node
	ReceivedOn         Subject = "in-interface"
	LeavingBy          Subject = "out-interface"
)

// Conditions returns the table of the policy, in the order in which the
// conditions are asked; the first that decides ends it. Nothing else in this
// module lists them: names, texts and rules follow from the rows.
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

// Question returns what the condition asks, in words.
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

// Entries returns the list of the condition in a config.
func (c Condition) Entries(from Config) []CIDR {
	if c.cidrs == nil {
		return nil
	}
	return *c.cidrs(&from)
}

// Interfaces returns the interfaces of the condition in a config.
func (c Condition) Interfaces(from Config) []Interface {
	if c.interfaces == nil {
		return nil
	}
	return *c.interfaces(&from)
}

// HasInterfaces reports whether the value of the condition is a list of interfaces.
func (c Condition) HasInterfaces() bool { return c.interfaces != nil }

// Off returns where a config sets the condition to false, nil if it does not.
func (c Condition) Off(from Config) *Position {
	if c.off == nil {
		return nil
	}
	return *c.off(&from)
}

// A Given is a value that a config has for a condition: an entry of its list, or
// false.
type Given struct {
	Text string
	Pos  Position
}

// Given returns the values that a config has for the condition.
func (c Condition) Given(from Config) []Given {
	if at := c.Off(from); at != nil {
		return []Given{{"false", *at}}
	}
	var out []Given
	for _, entry := range c.Entries(from) {
		out = append(out, Given{entry.String(), entry.Pos})
	}
	for _, entry := range c.Interfaces(from) {
		out = append(out, Given{entry.Name, entry.Pos})
	}
	return out
}

// Defaults are what the command line says of the keys that a file leaves out.
type Defaults struct {
	AllReservedRanges bool // exempt all reserved ranges, not only those of RFC 1918
	EnableIPv6        bool
	ResyncInterval    time.Duration // 0 means 60s
}

// Default returns the Config that holds without any file.
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

// defaultCIDRs returns the ranges of RFC 1918 and, if all is set, the further
// reserved ranges that the older agents exempt with
// --nomasq-all-reserved-ranges.
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
