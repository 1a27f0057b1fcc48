package nft

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// A Policy is what a config decides, with everything taken out that does not
// decide: the form of the file, covered CIDRs, families that are off.
type Policy struct {
	Families    []FamilyPolicy // IPv4, then IPv6 where it is on
	RandomFully bool
	Ports       []PortRange
	Enforce     *Enforcement // nil: other programs may translate what is exempt
}

// An Enforcement says that what pods send to exempt destinations keeps its address
// whatever other programs do.
type Enforcement struct {
	At    config.Position
	Marks []Mark // of packets that are left to the programs which marked them
}

// A FamilyPolicy is what is asked about connections of one address family.
type FamilyPolicy struct {
	IPv6      bool
	SNAT      SNAT       // of what is masqueraded
	Questions []Question // in the order in which they are asked
}

// A Question is a condition that a config sets for a family: a list with entries,
// or one without a list.
type Question struct {
	config.Condition
	List
	Interfaces []config.Interface // sorted, none covers another
	At         config.Position    // of a condition without a list
}

// A List holds CIDRs of which none covers another, in the order of the files.
type List struct {
	CIDRs   []config.CIDR
	Covered []Covered
	written []config.CIDR  // where these are more than the CIDRs
	sorted  []netip.Prefix // the CIDRs by address, where the list was compiled
}

// NewList makes a list of what was written, in the order of the files.
func NewList(written []config.CIDR) List { return dropCovered(written) }

// Written returns the entries as they were written, covered ones and duplicates
// included: the older agents make a rule of each.
func (l List) Written() []config.CIDR {
	if l.written != nil {
		return l.written
	}
	return l.CIDRs
}

// Covered is a CIDR that was dropped because another one says the same.
type Covered struct {
	config.CIDR
	By config.CIDR
}

// Link-local networks: RFC 3927 and RFC 4291. They stand first in the lists, as
// the older agents have it, and come from no file.
var (
	linkLocalIPv4 = netip.MustParsePrefix("169.254.0.0/16")
	linkLocalIPv6 = netip.MustParsePrefix("fe80::/10")
)

// NewPolicy takes from a config and the options what decides packets. A condition
// that the layout cannot express is left out; [Build] refuses it.
func NewPolicy(c config.Config, o Options) Policy {
	p := Policy{RandomFully: o.RandomFully, Ports: o.Ports}
	p.Families = append(p.Families, newFamilyPolicy(c, o.Layout, false, linkLocalIPv4, c.MasqLinkLocal))
	if c.EnableIPv6 {
		p.Families = append(p.Families, newFamilyPolicy(c, o.Layout, true, linkLocalIPv6, c.MasqLinkLocalIPv6))
	}
	if c.Enforce != nil && o.Layout.Translates() {
		p.Enforce = &Enforcement{At: *c.Enforce, Marks: o.Marks}
	}
	return p
}

func newFamilyPolicy(c config.Config, l Layout, ipv6 bool, linkLocal netip.Prefix, masqLinkLocal bool) FamilyPolicy {
	f := FamilyPolicy{IPv6: ipv6}
	if l.Translates() {
		f.SNAT.List = dropCovered(ofFamily(c.SNATAddresses, ipv6))
	}
	for _, row := range config.Conditions() {
		if !l.Supports(row) {
			continue
		}
		if at := row.Off(c); at != nil {
			f.Questions = append(f.Questions, Question{Condition: row, At: *at})
		}
		f.AddInterfaces(row, row.Interfaces(c))
		cidrs := ofFamily(row.Entries(c), ipv6)
		if row.Key == config.KeyNonMasqueradeCIDRs && !masqLinkLocal {
			f.Add(row, withLinkLocal(cidrs, linkLocal))
		} else {
			f.Add(row, dropCovered(cidrs))
		}
	}
	return f
}

// withLinkLocal puts a link-local network first. If the file has it too, that is
// the place to name.
func withLinkLocal(cidrs []config.CIDR, linkLocal netip.Prefix) List {
	written := slices.Insert(cidrs, 0, config.CIDR{Prefix: linkLocal})
	again := 1 + slices.IndexFunc(written[1:], func(c config.CIDR) bool { return c.Prefix == linkLocal })
	if again == 0 {
		return dropCovered(written)
	}
	named := slices.Delete(slices.Clone(written), again, again+1)
	named[0] = written[again]
	l := dropCovered(named)
	l.written = written
	return l
}

// Add asks a further question, after those before it in the table. A list without
// entries asks nothing.
func (f *FamilyPolicy) Add(row config.Condition, l List) {
	if len(l.CIDRs) > 0 {
		f.Questions = append(f.Questions, Question{Condition: row, List: l})
	}
}

// AddInterfaces is [FamilyPolicy.Add] of a list of interfaces.
func (f *FamilyPolicy) AddInterfaces(row config.Condition, list []config.Interface) {
	var kept []config.Interface
	for _, i := range slices.SortedStableFunc(slices.Values(list), func(a, b config.Interface) int { return cmp.Compare(a.Name, b.Name) }) {
		covered := slices.ContainsFunc(list, func(o config.Interface) bool {
			prefix, several := o.Prefix()
			return several && o.Name != i.Name && strings.HasPrefix(i.Name, prefix)
		})
		if !covered && (len(kept) == 0 || kept[len(kept)-1].Name != i.Name) {
			kept = append(kept, i)
		}
	}
	if len(kept) > 0 {
		f.Questions = append(f.Questions, Question{Condition: row, Interfaces: kept})
	}
}

// List returns the list of a key, empty if it is not asked.
func (f FamilyPolicy) List(key string) List {
	for _, q := range f.Questions {
		if q.Key == key {
			return q.List
		}
	}
	return List{}
}

// ExemptDestinations returns the networks that keep the source address unless
// another condition decides before.
func (p Policy) ExemptDestinations() []netip.Prefix {
	var out []netip.Prefix
	for _, f := range p.Families {
		for _, q := range f.Questions {
			if q.Asks == config.DestinationAddress && !q.Masquerade {
				out = append(out, q.Prefixes()...)
			}
		}
	}
	return out
}

func ofFamily(cidrs []config.CIDR, ipv6 bool) []config.CIDR {
	out := make([]config.CIDR, 0, len(cidrs)+1)
	for _, c := range cidrs {
		if c.Addr().Is6() == ipv6 {
			out = append(out, c)
		}
	}
	return out
}

// dropCovered leaves out what another entry covers; of equals the first stays.
// Adjacent CIDRs stay apart, so that people find in the kernel what they wrote.
func dropCovered(cidrs []config.CIDR) List {
	order := make([]place, len(cidrs))
	for i, c := range cidrs {
		order[i] = placeOf(c.Prefix, i)
	}
	if !slices.IsSortedFunc(order, place.compare) {
		slices.SortFunc(order, place.compare)
	}
	l := List{CIDRs: cidrs, sorted: make([]netip.Prefix, 0, len(cidrs))}
	coveredBy := make(map[int]int)
	last := -1
	for _, p := range order {
		if last >= 0 && cidrs[last].Overlaps(cidrs[p.index].Prefix) {
			coveredBy[p.index] = last
			continue
		}
		last = p.index
		l.sorted = append(l.sorted, cidrs[last].Prefix)
	}
	if len(coveredBy) == 0 {
		return l
	}
	l.CIDRs, l.written = nil, cidrs
	for i, c := range cidrs {
		if by, ok := coveredBy[i]; ok {
			l.Covered = append(l.Covered, Covered{c, cidrs[by]})
		} else {
			l.CIDRs = append(l.CIDRs, c)
		}
	}
	return l
}

// A place is where an entry of a list stands among the addresses. It sorts three
// times as fast as the prefix itself, which holds a pointer.
type place struct {
	high, low   uint64
	bits, index int
}

func placeOf(p netip.Prefix, index int) place {
	b := p.Addr().As16()
	return place{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:]), p.Bits(), index}
}

// compare sorts as [comparePrefix] does, and equals by their index.
func (p place) compare(o place) int {
	switch {
	case p.high != o.high:
		return cmp.Compare(p.high, o.high)
	case p.low != o.low:
		return cmp.Compare(p.low, o.low)
	case p.bits != o.bits:
		return cmp.Compare(p.bits, o.bits)
	}
	return cmp.Compare(p.index, o.index)
}

// comparePrefix sorts by address, the wider prefix first.
func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// Prefixes gives the list in the order of the addresses. It is not to be
// changed.
func (l List) Prefixes() []netip.Prefix {
	if l.sorted != nil {
		return l.sorted
	}
	out := make([]netip.Prefix, len(l.CIDRs))
	for i, c := range l.CIDRs {
		out[i] = c.Prefix
	}
	if !slices.IsSortedFunc(out, comparePrefix) {
		slices.SortFunc(out, comparePrefix)
	}
	return out
}

// find gives the entry that holds the address.
func (l List) find(a netip.Addr) (config.CIDR, bool) {
	for _, c := range l.CIDRs {
		if c.Contains(a) {
			return c, true
		}
	}
	return config.CIDR{}, false
}

// A digest is a hash over what a policy decides.
type digest [sha256.Size]byte

// String gives the eight hex digits that people see.
func (d digest) String() string { return hex.EncodeToString(d[:4]) }

// Hash gives eight hex digits over what the policy decides: two policies with
// the same digits decide alike, whatever the order and form of their files.
func (p Policy) Hash() string { return p.digest().String() }

func (p Policy) digest() digest {
	var b []byte
	h := sha256.New()
	for _, f := range p.Families {
		b = fmt.Appendf(b, "%s\n", f.Family())
		for _, q := range f.Questions {
			b = fmt.Appendf(b, "%s\n", q.Name(f))
			for _, p := range q.Prefixes() {
				b = append(p.AppendTo(b), '\n')
			}
			for _, i := range q.Interfaces {
				b = fmt.Appendf(b, "%s\n", i.Name)
			}
		}
		for _, p := range f.SNAT.Prefixes() {
			b = fmt.Appendf(b, "snat %s\n", p)
		}
		_, _ = h.Write(b)
		b = b[:0]
	}
	b = fmt.Appendf(b, "random-fully %t\nports %v\n", p.RandomFully, p.Ports)
	if p.Enforce != nil {
		b = fmt.Appendf(b, "enforce %v\n", p.Enforce.Marks)
	}
	_, _ = h.Write(b)
	return digest(h.Sum(nil))
}

// sameOrder says whether the same was written in two policies, in the same order.
func (f FamilyPolicy) sameOrder(o FamilyPolicy) bool {
	return f.IPv6 == o.IPv6 && slices.EqualFunc(f.Questions, o.Questions, func(a, b Question) bool {
		return a.Key == b.Key &&
			slices.EqualFunc(a.Written(), b.Written(), func(a, b config.CIDR) bool { return a.Prefix == b.Prefix })
	})
}

// Name is unique among the questions of both families.
func (q Question) Name(f FamilyPolicy) string {
	return cmp.Or(q.Set, q.Key) + f.Suffix()
}

// Family returns the netfilter family.
func (f FamilyPolicy) Family() nfnetlink.Family {
	if f.IPv6 {
		return nfnetlink.IPv6
	}
	return nfnetlink.IPv4
}

// Suffix ends the names of the family's sets and counters.
func (f FamilyPolicy) Suffix() string {
	if f.IPv6 {
		return "-v6"
	}
	return "-v4"
}
