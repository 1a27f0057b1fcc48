package nft

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// A Policy is the meaning of a config, without what has no effect: the format of the file, covered CIDRs, and families
// that are off.
type Policy struct {
	Families    []FamilyPolicy // IPv4, then IPv6 if it is on
	RandomFully bool
	Ports       []PortRange
	PortsPerPod int          // 0: no blocks
	Enforce     *Enforcement // nil: other programs may translate what is exempt
	DropInvalid bool         // packets of pods that conntrack calls invalid are dropped, where others are masqueraded
}

// An Enforcement means that pod traffic to exempt destinations keeps its address,
// regardless of other programs.
type Enforcement struct {
	Pos   config.Position
	Marks []Mark // of packets that are left to the programs that marked them
}

// A FamilyPolicy is the part of a policy for one address family.
type FamilyPolicy struct {
	IPv6       bool
	SNAT       []SNATRule  // for masqueraded connections, the first that matches and has an address on the node applies
	Conditions []Condition // in evaluation order
}

// A Condition is a condition that a config sets for a family: a list with entries,
// or one without a list.
type Condition struct {
	config.Row
	List
	Interfaces []config.Interface // sorted, none covers another
	Pos        config.Position    // of a condition without a list
}

// A List is CIDRs of which none covers another, in file order.
type List struct {
	CIDRs []config.CIDR
	// Written are all entries, including covered ones and duplicates: the older agents
	// create a rule for each.
	Written []config.CIDR
	sorted  []netip.Prefix // the CIDRs by address
}

// NewList returns a list of the written entries, in file order. Of equal ones the first is
// kept. Adjacent CIDRs are not merged, so that people find in the kernel what they wrote.
func NewList(written []config.CIDR) List {
	sorted := make([]netip.Prefix, len(written))
	for i, c := range written {
		sorted[i] = c.Prefix
	}
	slices.SortFunc(sorted, comparePrefixes)
	l := List{CIDRs: written, Written: written, sorted: sorted[:0]}
	for _, p := range sorted {
		if n := len(l.sorted); n == 0 || !l.sorted[n-1].Overlaps(p) {
			l.sorted = append(l.sorted, p)
		}
	}
	if len(l.sorted) == len(written) {
		return l
	}
	l.CIDRs = make([]config.CIDR, 0, len(l.sorted))
	listed := make([]bool, len(l.sorted))
	for _, c := range written {
		i, kept := slices.BinarySearchFunc(l.sorted, c.Prefix, comparePrefixes)
		if kept && !listed[i] {
			listed[i] = true
			l.CIDRs = append(l.CIDRs, c)
		}
	}
	return l
}

// comparePrefixes compares prefixes without host bits, in half of the time of [netip.Prefix.Compare].
func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
}

// An Exemption is a network that is exempt unless a key of the file is true. It is first in the list, as with the older
// agents.
type Exemption struct {
	Prefix netip.Prefix
	Key    string
}

// Exemptions returns the link-local networks: RFC 3927 and RFC 4291.
func Exemptions() []Exemption {
	return []Exemption{
		{netip.MustParsePrefix("169.254.0.0/16"), config.KeyMasqLinkLocal},
		{netip.MustParsePrefix("fe80::/10"), config.KeyMasqLinkLocalIPv6},
	}
}

// NewPolicy returns the policy of a config and options. It always succeeds: a condition that the layout cannot express
// is left out, and [Build] rejects it.
func NewPolicy(c config.Config, o Options) Policy {
	p := Policy{RandomFully: o.RandomFully, Ports: o.Ports}
	if c.RandomFully != nil {
		p.RandomFully = *c.RandomFully
	}
	if c.ToPorts != nil {
		p.Ports = *c.ToPorts
	}
	p.Families = append(p.Families, newFamilyPolicy(c, o.Layout.Mode(), false))
	if c.EnableIPv6 {
		p.Families = append(p.Families, newFamilyPolicy(c, o.Layout.Mode(), true))
	}
	if o.Layout.Mode() == ModeNFTables {
		p.PortsPerPod = int(c.PortsPerPod)
		p.DropInvalid = c.DropInvalid
		if c.Enforce {
			p.Enforce = &Enforcement{Pos: c.Given(config.KeyEnforceNonMasquerade), Marks: o.Marks}
		}
	}
	return p
}

func newFamilyPolicy(c config.Config, m Mode, ipv6 bool) FamilyPolicy {
	f := FamilyPolicy{IPv6: ipv6}
	if m == ModeNFTables {
		f.SNAT = newSNATRules(c, ipv6)
	}
	for _, row := range config.Conditions() {
		if m != ModeNFTables && !row.BothModes {
			continue
		}
		cidrs := ofFamily(row.Entries(c), ipv6)
		if row.Key == config.KeyNonMasqueradeCIDRs {
			cidrs = withExemptions(c, cidrs, ipv6)
		}
		condition := Condition{Row: row, List: NewList(cidrs), Interfaces: uncovered(row.Interfaces(c))}
		if row.On(c) {
			condition.Pos = c.Given(row.Key)
		}
		if row.On(c) || len(condition.CIDRs)+len(condition.Interfaces) > 0 {
			f.Conditions = append(f.Conditions, condition)
		}
	}
	return f
}

// withExemptions inserts a family's exemptions at the front of its list. If the file lists one of them, too, that has
// the position in the file.
func withExemptions(c config.Config, cidrs []config.CIDR, ipv6 bool) []config.CIDR {
	masqueraded := map[string]bool{
		config.KeyMasqLinkLocal: c.MasqLinkLocal, config.KeyMasqLinkLocalIPv6: c.MasqLinkLocalIPv6,
	}
	var exempt []config.CIDR
	for _, e := range Exemptions() {
		if masqueraded[e.Key] || e.Prefix.Addr().Is6() != ipv6 {
			continue
		}
		first := config.CIDR{Prefix: e.Prefix}
		if i := slices.IndexFunc(cidrs, func(c config.CIDR) bool { return c.Prefix == e.Prefix }); i >= 0 {
			first = cidrs[i]
		}
		exempt = append(exempt, first)
	}
	if len(exempt) == 0 {
		return cidrs
	}
	return slices.Concat(exempt, cidrs)
}

// uncovered returns interfaces by name, without those that another one covers.
func uncovered(list []config.Interface) (kept []config.Interface) {
	byName := func(a, b config.Interface) int { return cmp.Compare(a.Name, b.Name) }
	for _, i := range slices.SortedStableFunc(slices.Values(list), byName) {
		covers := func(o config.Interface) bool { return o.Name != i.Name && o.Matches(i.Name) }
		if !slices.ContainsFunc(list, covers) && (len(kept) == 0 || kept[len(kept)-1].Name != i.Name) {
			kept = append(kept, i)
		}
	}
	return kept
}

// Family returns the part for a family; false if it is off.
func (p Policy) Family(ipv6 bool) (FamilyPolicy, bool) {
	for _, f := range p.Families {
		if f.IPv6 == ipv6 {
			return f, true
		}
	}
	return FamilyPolicy{}, false
}

// condition returns the condition of a key, the zero value if it is not set.
func (f FamilyPolicy) condition(key string) Condition {
	for _, condition := range f.Conditions {
		if condition.Key == key {
			return condition
		}
	}
	return Condition{}
}

// List returns the list of a key, empty if it is not set.
func (f FamilyPolicy) List(key string) List { return f.condition(key).List }

// ofFamily returns the CIDRs of a family: the list itself if it has no others.
func ofFamily(cidrs []config.CIDR, ipv6 bool) (selected []config.CIDR) {
	if !slices.ContainsFunc(cidrs, func(c config.CIDR) bool { return c.Addr().Is6() != ipv6 }) {
		return cidrs
	}
	for _, c := range cidrs {
		if c.Addr().Is6() == ipv6 {
			selected = append(selected, c)
		}
	}
	return selected
}

// Prefixes returns the list sorted by address. It must not be modified.
func (l List) Prefixes() []netip.Prefix { return l.sorted }

// Find returns the entry that contains the address.
func (l List) Find(a netip.Addr) (config.CIDR, bool) {
	prefix, found := l.Covering(a)
	if !found {
		return config.CIDR{}, false
	}
	i := slices.IndexFunc(l.CIDRs, func(c config.CIDR) bool { return c.Prefix == prefix })
	return l.CIDRs[i], true
}

// Contains reports whether an entry contains the address.
func (l List) Contains(a netip.Addr) bool {
	_, found := l.Covering(a)
	return found
}

// Covering returns the entry that contains the address, without its position. It takes one binary
// search.
func (l List) Covering(a netip.Addr) (netip.Prefix, bool) {
	index, _ := slices.BinarySearchFunc(l.sorted, a, func(p netip.Prefix, a netip.Addr) int {
		if a.Less(p.Addr()) {
			return 1
		}
		return -1
	})
	if index == 0 || !l.sorted[index-1].Contains(a) {
		return netip.Prefix{}, false
	}
	return l.sorted[index-1], true
}

// A digest is a hash of a policy.
type digest [sha256.Size]byte

// String returns the eight hex digits that users see.
func (d digest) String() string { return hex.EncodeToString(d[:4]) }

// Hash returns eight hex digits that identify the policy: policies with the same digits mean the same, regardless of
// the order and format of their files.
func (p Policy) Hash() string { return p.digest().String() }

func (p Policy) digest() digest {
	h := sha256.New()
	w := bufio.NewWriter(h) // writing to a hash never fails
	write := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }
	for _, f := range p.Families {
		write("%s\n", f.NetfilterFamily())
		for _, condition := range f.Conditions {
			write("%s\n", condition.Name(f))
			for _, p := range condition.Prefixes() { // there are many
				_, _ = w.Write(append(p.AppendTo(w.AvailableBuffer()), '\n'))
			}
			for _, i := range condition.Interfaces {
				write("%s\n", i.Name)
			}
		}
		for _, p := range f.SNATAddresses().Addresses.Prefixes() {
			write("snat %s\n", p)
		}
		for _, r := range f.SNATRules() {
			write("snat rule %d from %v to %v out", r.Number, r.Sources.Prefixes(), r.Destinations.Prefixes())
			for _, i := range r.Interfaces {
				write(" %s", i.Name)
			}
			write(" %v\n", r.Addresses.Prefixes())
		}
	}
	write("random-fully %t\nports %v\n", p.RandomFully, p.Ports)
	if p.Enforce != nil {
		write("enforce %v\n", p.Enforce.Marks)
	}
	if p.DropInvalid {
		write("drop invalid\n")
	}
	if p.PortsPerPod > 0 {
		write("ports per pod %d\n", p.PortsPerPod)
	}
	_ = w.Flush()
	return digest(h.Sum(nil))
}

// Name returns a name that is unique among the conditions of both families.
func (c Condition) Name(f FamilyPolicy) string {
	return cmp.Or(c.Set, c.Key) + f.Suffix()
}

// NetfilterFamily returns the netfilter family.
func (f FamilyPolicy) NetfilterFamily() nfnetlink.Family {
	if f.IPv6 {
		return nfnetlink.IPv6
	}
	return nfnetlink.IPv4
}

// Suffix returns the suffix of the family's sets and counters.
func (f FamilyPolicy) Suffix() string {
	if f.IPv6 {
		return "-v6"
	}
	return "-v4"
}
