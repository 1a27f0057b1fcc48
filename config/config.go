package config

import (
	"math"
	"net/netip"
	"reflect"
	"slices"
	"time"
)

// A CIDR is a network from a config file: masked, without a zone, and never
// IPv4-mapped.
type CIDR struct {
	netip.Prefix
	Pos Position
}

// Text returns the CIDR, or the address alone if it holds just one.
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
	ExemptHost            bool // masqueradeHost: false

	MasqueradeSrcInterfaces    []Interface
	MasqueradeOutInterfaces    []Interface
	NonMasqueradeOutInterfaces []Interface

	Enforce       bool
	DropInvalid   bool
	SNATAddresses []CIDR // a single address is a CIDR of its full length
	SNATRules     []SNATRule

	PortsPerPod PodPorts
	ToPorts     *[]PortRange // nil: as the flag --to-ports says
	RandomFully *bool        // nil: as the flag --random-fully says

	MasqLinkLocal     bool
	MasqLinkLocalIPv6 bool
	EnableIPv6        bool

	ResyncInterval time.Duration // from a file: 1s to 24h

	StaleConnections Stale

	CIDRLimit int // of NonMasqueradeCIDRs

	given map[string]Position // of the keys that the files set
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

// A Row is a row of the table of keys. A condition is a key with something that it
// checks in the first packet of a connection, and the resulting verdict.
type Row struct {
	Key   string
	Means string // description in check, and the comment of its set
	Set   string // name of the nftables set for its list, without the family suffix; "": it has no set

	Asks       Subject // "": it is not a condition
	Outside    bool    // matches whatever is not in the list
	Masquerade bool    // the verdict if it matches; false: exempt
	WinBridge  bool    // win-bridge can express it
	// BothModes means that the older agents have the key or, for toPorts and randomFully, the flag. All others need mode
	// nftables.
	BothModes bool

	// field is the name of its field in a Config, of type []CIDR, []Interface, []SNATRule,
	// bool, *bool, *[]PortRange, PodPorts, int, time.Duration, or Stale.
	field   string
	inverse bool // the field is true if the key is false

	*entryKind // of a list
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

// table has the rows of all keys of a file: the conditions in evaluation order, of
// which the first one that matches applies, then the keys that control the source
// address once one has matched, then the others. No other code lists the keys:
// parsing, names, texts and rules are derived from these rows. It is never changed.
var table = []Row{
	{
		Key: "masqueradeHost", Asks: SentByNode,
		Means: "what this node itself sends keeps its address",
		field: "ExemptHost", inverse: true,
	},
	{
		Key: KeyMasqueradeSrcInterfaces, Asks: ReceivedOn, Outside: true,
		Means: "only what was received on one of these interfaces is masqueraded",
		field: "MasqueradeSrcInterfaces", entryKind: &interfaces,
	},
	{
		Key: KeyMasqueradeSrcCIDRs, Asks: SourceAddress, Outside: true, Set: "masq-src",
		Means: "the only sources that are masqueraded",
		field: "MasqueradeSrcCIDRs", entryKind: &cidrs,
	},
	{
		Key: KeyNonMasqueradeSrcCIDRs, Asks: SourceAddress, Set: "non-masq-src",
		Means: "sources that keep their own address",
		field: "NonMasqueradeSrcCIDRs", entryKind: &cidrs,
	},
	{
		Key: "nonMasqueradeOutInterfaces", Asks: LeavingBy,
		Means: "what leaves by one of these interfaces keeps its address",
		field: "NonMasqueradeOutInterfaces", entryKind: &interfaces,
	},
	{
		Key: keyMasqueradeOutInterfaces, Asks: LeavingBy, Outside: true,
		Means: "only what leaves by one of these interfaces is masqueraded",
		field: "MasqueradeOutInterfaces", entryKind: &interfaces,
	},
	{
		Key: KeyForceMasqueradeCIDRs, Asks: DestinationAddress, Masquerade: true, Set: "force-masq",
		Means: "destinations that always see the node's address",
		field: "ForceMasqueradeCIDRs", entryKind: &cidrs,
	},
	{
		Key: KeyNonMasqueradeCIDRs, Asks: DestinationAddress, Set: "non-masq", WinBridge: true,
		Means: "destinations that see the pod's own address",
		field: "NonMasqueradeCIDRs", entryKind: &cidrs, BothModes: true,
	},
	{
		Key:   KeyEnforceNonMasquerade,
		Means: "no other program translates what pods send to exempt destinations",
		field: "Enforce",
	},
	{
		Key: KeySNATAddresses, Set: "snat",
		Means: "masqueraded connections leave from one of these that the node has",
		field: "SNATAddresses", entryKind: &addresses,
	},
	{
		Key:   KeySNATRules,
		Means: "masqueraded connections leave from an address of the first entry that matches and has one on the node",
		field: "SNATRules",
	},
	{
		Key:   KeyDropInvalid,
		Means: "packets of pods that would leave untranslated, because they belong to no connection, are dropped",
		field: "DropInvalid",
	},
	{
		Key:   KeyPortsPerPod,
		Means: "masqueraded connections of a pod get their source ports from a block of this size, by the low bits of its IP",
		field: "PortsPerPod",
	},
	{Key: KeyMasqLinkLocal, field: "MasqLinkLocal", BothModes: true},
	{Key: KeyMasqLinkLocalIPv6, field: "MasqLinkLocalIPv6", BothModes: true},
	{Key: KeyEnableIPv6, field: "EnableIPv6"},
	{Key: KeyToPorts, field: "ToPorts", BothModes: true},
	{Key: keyRandomFully, field: "RandomFully", BothModes: true},
	{Key: keyLinkLocal, field: "MasqLinkLocal", BothModes: true},
	{Key: keyResyncInterval, field: "ResyncInterval", BothModes: true},
	{Key: keyCIDRLimit, field: "CIDRLimit", BothModes: true},
	{Key: keyStaleConnections, field: "StaleConnections"},
}

// Conditions returns the rows of the conditions in evaluation order.
func Conditions() []Row {
	return slices.DeleteFunc(slices.Clone(table), func(r Row) bool { return r.Asks == "" })
}

// Translations returns the rows of the keys that control the source address of a
// connection once a condition has matched. They need mode nftables.
func Translations() []Row {
	return slices.DeleteFunc(slices.Clone(table), func(r Row) bool { return r.Asks != "" || r.Means == "" })
}

// SNATAddresses returns the row of that key.
func SNATAddresses() Row { return *knownKey(KeySNATAddresses) }

// NeedsNFTables returns an error for each key that the files of a config set and only mode nftables supports.
func NeedsNFTables(c Config) (problems Problems) {
	for _, row := range table {
		if position, given := c.given[row.Key]; given && !row.BothModes {
			problems = append(problems, Problem{ID: "needsNFTables", Pos: position, Msg: row.Key + " needs mode nftables"})
		}
	}
	return problems
}

// Question describes in words what the condition checks.
func (r Row) Question() string {
	switch r.Asks {
	case SentByNode:
		return "from an address of this node"
	case ReceivedOn:
		return "received on one of " + r.Key
	case LeavingBy:
		return "leaving by one of " + r.Key
	case SourceAddress, DestinationAddress:
		return string(r.Asks) + " in " + r.Key
	}
	r.Unknown()
	return ""
}

// LimitsSources reports whether the condition lists all sources that are masqueraded: pods,
// or the interfaces on which they send.
func (r Row) LimitsSources() bool {
	switch r.Asks {
	case SourceAddress, ReceivedOn:
		return r.Outside
	case SentByNode, LeavingBy, DestinationAddress, "":
	default:
		r.Unknown()
	}
	return false
}

// Unknown ends the program because of a condition about something that the caller does not
// know: no answer would be right. Tests ask everybody about all conditions.
func (r Row) Unknown() { panic("condition about " + string(r.Asks)) }

// in returns a pointer to the key's field of a config.
func (r Row) in(c *Config) any {
	return reflect.ValueOf(c).Elem().FieldByName(r.field).Addr().Interface()
}

// Entries returns the key's CIDRs in a config, also those in its entries.
func (r Row) Entries(c Config) []CIDR {
	entries := get[[]CIDR](r, c)
	for _, rule := range get[[]SNATRule](r, c) {
		entries = append(entries, slices.Concat(rule.From, rule.To, rule.Addresses)...)
	}
	return entries
}

// Interfaces returns the key's interfaces in a config.
func (r Row) Interfaces(c Config) []Interface { return get[[]Interface](r, c) }

// On reports whether a config has the condition, if it is one without a list.
func (r Row) On(c Config) bool { return get[bool](r, c) }

// get returns the value of a key if it is of that type.
func get[T any](r Row, c Config) (value T) {
	if field, ok := r.in(&c).(*T); ok {
		value = *field
	}
	return value
}

// Given returns the position at which the files of a config set a key, the zero position if they do not.
func (c Config) Given(key string) Position { return c.given[key] }

// Defaults are the values that command-line flags set for keys missing from the file.
type Defaults struct {
	AllReservedRanges bool // exempt all reserved ranges, not only those of RFC 1918
	EnableIPv6        bool
	ResyncInterval    time.Duration // 0 means 60s
	// Chain is the name for mode iptables-nft. With that of non-masquerade-daemon, a file is read as one of its.
	Chain string
}

// Default returns the Config that applies without a file.
func Default(d Defaults) Config {
	c := Config{
		NonMasqueradeCIDRs: defaultCIDRs(d.AllReservedRanges),
		EnableIPv6:         d.EnableIPv6,
		ResyncInterval:     d.ResyncInterval,
		CIDRLimit:          math.MaxInt,
	}
	if c.ResyncInterval == 0 {
		c.ResyncInterval = time.Minute
	}
	return c
}

// defaultCIDRs returns the RFC 1918 ranges and, if reserved is set, the other reserved
// ranges that the older agents exempt with --nomasq-all-reserved-ranges.
func defaultCIDRs(reserved bool) []CIDR {
	ranges := []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}
	if reserved {
		ranges = append(ranges, "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24",
			"198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")
	}
	cidrs := make([]CIDR, len(ranges))
	for i, r := range ranges {
		cidrs[i].Prefix = netip.MustParsePrefix(r)
	}
	return cidrs
}
