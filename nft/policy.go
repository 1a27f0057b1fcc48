package nft

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
)

// A Policy is what a config decides, without everything that does not matter for
// it: the format of the file, covered CIDRs, and families that are off.
type Policy struct {
	Families    []FamilyPolicy // IPv4, then IPv6 if it is on
	RandomFully bool
	Ports       []PortRange
	Enforce     *Enforcement // nil: other programs may translate what is exempt
	DropInvalid bool         // what would be masqueraded if conntrack had a connection for it
}

// An Enforcement means that pod traffic to exempt destinations keeps its address,
// regardless of other programs.
type Enforcement struct {
	At    config.Position
	Marks []Mark // of packets that are left to the programs that marked them
}

// A FamilyPolicy is the part of a policy for one address family.
type FamilyPolicy struct {
	IPv6      bool
	SNAT      SNAT       // of what is masqueraded
	Questions []Question // in evaluation order
}

// A Question is a condition that a config sets for a family: a list with entries,
// or one without a list.
type Question struct {
	config.Row
	List
	Interfaces []config.Interface // sorted, none covers another
	At         config.Position    // position of a condition without a list
}

// A List is CIDRs of which none covers another, in file order.
type List struct {
	CIDRs     []config.CIDR
	written   []config.CIDR  // all entries, if there are more than the CIDRs
	coveredBy []int32        // of the entries with covered ones: the index of the one that covers it, or -1
	entries   []config.CIDR  // to which coveredBy refers
	sorted    []netip.Prefix // the CIDRs by address, if the list was compiled
}

// NewList returns a list of the written entries, in file order.
func NewList(written []config.CIDR) List { return dropCovered(written) }

// Written returns the entries as written, including covered ones and duplicates:
// the older agents create a rule for each.
func (l List) Written() []config.CIDR {
	if l.written != nil {
		return l.written
	}
	return l.CIDRs
}

// Covered returns the CIDRs that were dropped, each with the one that covers it.
func (l List) Covered() iter.Seq2[config.CIDR, config.CIDR] {
	return func(yield func(dropped, by config.CIDR) bool) {
		for i, by := range l.coveredBy {
			if by >= 0 && !yield(l.entries[i], l.entries[by]) {
				return
			}
		}
	}
}

// Link-local networks: RFC 3927 and RFC 4291. They are first in the lists, as
// with the older agents, and not from a file.
var (
	linkLocalIPv4 = netip.MustParsePrefix("169.254.0.0/16")
	linkLocalIPv6 = netip.MustParsePrefix("fe80::/10")
)

// NewPolicy returns the policy of a config and options. A condition that the
// layout cannot express is left out; [Build] rejects it.
func NewPolicy(c config.Config, o Options) Policy {
	p := Policy{RandomFully: o.RandomFully, Ports: o.Ports}
	p.Families = append(p.Families, newFamilyPolicy(c, o.Layout.Mode(), false, linkLocalIPv4, c.MasqLinkLocal))
	if c.EnableIPv6 {
		p.Families = append(p.Families, newFamilyPolicy(c, o.Layout.Mode(), true, linkLocalIPv6, c.MasqLinkLocalIPv6))
	}
	if c.Enforce != nil && o.Layout.Mode() == ModeNFTables {
		p.Enforce = &Enforcement{At: *c.Enforce, Marks: o.Marks}
	}
	p.DropInvalid = c.DropInvalid != nil && o.Layout.Mode() == ModeNFTables
	return p
}

func newFamilyPolicy(c config.Config, m Mode, ipv6 bool, linkLocal netip.Prefix, masqLinkLocal bool) FamilyPolicy {
	f := FamilyPolicy{IPv6: ipv6}
	if m == ModeNFTables {
		f.SNAT.List = dropCovered(ofFamily(c.SNATAddresses, ipv6))
	}
	for _, row := range config.Conditions() {
		if !m.Supports(row) {
			continue
		}
		if at := row.Explicit(c); at != nil {
			f.Questions = append(f.Questions, Question{Row: row, At: *at})
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

// withLinkLocal inserts a link-local network at the front. If the file has it
// too, its position is that in the file.
func withLinkLocal(cidrs []config.CIDR, linkLocal netip.Prefix) List {
	written := slices.Concat([]config.CIDR{{Prefix: linkLocal}}, cidrs)
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

// Add adds a question in the order of the table. A list without entries adds
// none.
func (f *FamilyPolicy) Add(row config.Row, l List) {
	if len(l.CIDRs) > 0 {
		f.Questions = append(f.Questions, Question{Row: row, List: l})
	}
}

// AddInterfaces is like [FamilyPolicy.Add] for a list of interfaces.
func (f *FamilyPolicy) AddInterfaces(row config.Row, list []config.Interface) {
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
		f.Questions = append(f.Questions, Question{Row: row, Interfaces: kept})
	}
}

// List returns the list of a key, empty if it is not set.
func (f FamilyPolicy) List(key string) List {
	for _, q := range f.Questions {
		if q.Key == key {
			return q.List
		}
	}
	return List{}
}

// ExemptDestinations returns the networks to which connections keep their source
// address, unless an earlier condition decides.
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

// ofFamily returns the CIDRs of a family, which is the list itself if it has no
// others.
func ofFamily(cidrs []config.CIDR, ipv6 bool) []config.CIDR {
	n := 0
	for _, c := range cidrs {
		if c.Addr().Is6() == ipv6 {
			n++
		}
	}
	if n == 0 || n == len(cidrs) {
		return cidrs[:n:n]
	}
	out := make([]config.CIDR, 0, n)
	for _, c := range cidrs {
		if c.Addr().Is6() == ipv6 {
			out = append(out, c)
		}
	}
	return out
}

// dropCovered drops entries that another entry covers; of equal ones the first is
// kept. Adjacent CIDRs are not merged, so that people find in the kernel what
// they wrote.
func dropCovered(cidrs []config.CIDR) List {
	order := make([]place, len(cidrs))
	for i, c := range cidrs {
		order[i] = placeOf(c.Prefix, i)
	}
	if !slices.IsSortedFunc(order, place.compare) {
		slices.SortFunc(order, place.compare)
	}
	l := List{CIDRs: cidrs, sorted: make([]netip.Prefix, 0, len(cidrs))}
	last := int32(-1)
	for _, p := range order {
		if last >= 0 && cidrs[last].Overlaps(cidrs[p.index].Prefix) {
			if l.coveredBy == nil {
				l.coveredBy = slices.Repeat([]int32{-1}, len(cidrs))
			}
			l.coveredBy[p.index] = last
			continue
		}
		last = p.index
		l.sorted = append(l.sorted, cidrs[last].Prefix)
	}
	if l.coveredBy == nil {
		return l
	}
	l.CIDRs, l.written, l.entries = make([]config.CIDR, 0, len(l.sorted)), cidrs, cidrs
	for i, c := range cidrs {
		if l.coveredBy[i] < 0 {
			l.CIDRs = append(l.CIDRs, c)
		}
	}
	return l
}

// A place is the sort key of a list entry. It sorts three times as fast as the
// prefix itself, which contains a pointer.
type place struct {
	high, low   uint64
	bits, index int32
}

func placeOf(p netip.Prefix, index int) place {
	b := p.Addr().As16()
	return place{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:]), int32(p.Bits()), int32(index)}
}

// compare sorts like [netip.Prefix.Compare], and equal prefixes by their index.
func (p place) compare(o place) int {
	return cmp.Or(cmp.Compare(p.high, o.high), cmp.Compare(p.low, o.low), cmp.Compare(p.bits, o.bits), cmp.Compare(p.index, o.index))
}

// Prefixes returns the list sorted by address. It must not be modified.
func (l List) Prefixes() []netip.Prefix {
	if l.sorted != nil {
		return l.sorted
	}
	out := make([]netip.Prefix, len(l.CIDRs))
	for i, c := range l.CIDRs {
		out[i] = c.Prefix
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// find returns the entry that contains the address.
func (l List) find(a netip.Addr) (config.CIDR, bool) {
	for _, c := range l.CIDRs {
		if c.Contains(a) {
			return c, true
		}
	}
	return config.CIDR{}, false
}

// A digest is a hash of what a policy decides.
type digest [sha256.Size]byte

// String returns the eight hex digits that users see.
func (d digest) String() string { return hex.EncodeToString(d[:4]) }

// Hash returns eight hex digits that identify what the policy decides: policies
// with the same digits decide alike, regardless of the order and format of their
// files.
func (p Policy) Hash() string { return p.digest().String() }

func (p Policy) digest() digest {
	var b []byte
	h := sha256.New()
	for _, f := range p.Families {
		b = fmt.Appendf(b, "%s\n", f.Family())
		for _, q := range f.Questions {
			b = fmt.Appendf(b, "%s\n", q.Name(f))
			for _, p := range q.Prefixes() {
				if b = append(p.AppendTo(b), '\n'); len(b) > 4096 {
					_, _ = h.Write(b)
					b = b[:0]
				}
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
	if p.DropInvalid {
		b = append(b, "drop invalid\n"...)
	}
	_, _ = h.Write(b)
	return digest(h.Sum(nil))
}

// sameOrder reports whether two policies were written with the same entries in
// the same order.
func (f FamilyPolicy) sameOrder(o FamilyPolicy) bool {
	return f.IPv6 == o.IPv6 && slices.EqualFunc(f.Questions, o.Questions, func(a, b Question) bool {
		return a.Key == b.Key &&
			slices.EqualFunc(a.Written(), b.Written(), func(a, b config.CIDR) bool { return a.Prefix == b.Prefix })
	})
}

// Name returns a name that is unique among the questions of both families.
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

// Suffix returns the suffix of the family's sets and counters.
func (f FamilyPolicy) Suffix() string {
	if f.IPv6 {
		return "-v6"
	}
	return "-v4"
}
