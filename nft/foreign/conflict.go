package foreign

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/ruletext"
)

// A Conflict is a rule of somebody else that can decide about connections
// otherwise than the configuration.
type Conflict struct {
	Kind     Kind
	Rule     nfnetlink.Rule
	Base     string // the base chain from which it is reached
	Priority int32  // of the base chain
	// Via are the rules that lead from the base chain to this one.
	Via []nfnetlink.Rule
	// Exempt are the exempt prefixes that it reaches, in whole or in part: the
	// first few of them, where More says that there are others.
	Exempt []netip.Prefix
	More   bool
	// Source is the source addresses to which it is restricted, empty where
	// it is not. Conditions are its other conditions, and those on the way.
	Source     string
	Conditions []string
	// Of the kinds Exempts and Translates: the first few of the masqueraded
	// destinations that it reaches, none where it reaches all; whether it returns, and
	// does not accept; and whether it stands before our own jump.
	Destinations []string
	Returns      bool
	Shared       bool

	src []iprange.Range // of the kind Masquerades; nil where that is not kept
}

// maxNamed is the number of exempt prefixes that a conflict names.
const maxNamed = 8

// String gives the place, the rule and the reason in one line.
func (c Conflict) String() string {
	return fmt.Sprintf("%s %s (priority %d): %s: %s", c.Table(), c.Chain(), c.Priority, c.RuleText(), c.Why())
}

// Table gives the family and the name of the rule's table, as nft does.
func (c Conflict) Table() string {
	return c.Rule.Family.String() + " " + nfnetlink.Printable(c.Rule.Table)
}

// Chain returns the name of the rule's chain, as it goes into messages.
func (c Conflict) Chain() string { return nfnetlink.Printable(c.Rule.Chain) }

// RuleText gives the rule in words.
func (c Conflict) RuleText() string { return ruletext.String(c.Rule) }

// Packets returns what the rule has counted, nil if it does not count.
func (c Conflict) Packets() *uint64 {
	for _, e := range c.Rule.Exprs {
		if e.Name == "counter" {
			n := e.Uint64(unix.NFTA_COUNTER_PACKETS)
			return &n
		}
	}
	return nil
}

// ViaText gives the rules that lead to it in words.
func (c Conflict) ViaText() []string {
	words := make([]string, len(c.Via))
	for i, r := range c.Via {
		words[i] = ruletext.String(r)
	}
	return words
}

// From reports whether the rule can meet a source in one of the prefixes.
func (c Conflict) From(prefixes []netip.Prefix) bool {
	return c.src == nil || len(intersect(c.src, And(nil, prefixes))) > 0
}

// Hash tells conflicts apart by what is said of them, without what a rule has
// counted and its handle, which changes when it is made anew.
func (c Conflict) Hash(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	word := func(w string) {
		_, _ = h.WriteString(w)
		_ = h.WriteByte(0)
	}
	_ = h.WriteByte(byte(c.Kind))
	for _, w := range append([]string{c.Rule.Family.String(), c.Rule.Table, c.Rule.Chain, c.Base, c.Source}, c.Conditions...) {
		word(w)
	}
	for _, e := range c.Rule.Exprs {
		if word(e.Name); e.Name != "counter" {
			_, _ = h.Write(e.Data)
		}
	}
	for _, p := range c.Exempt {
		addr := p.Addr().As16()
		_, _ = h.Write(addr[:])
		_ = h.WriteByte(byte(p.Bits()))
	}
	return h.Sum64()
}

// Why says what the rule does and to which packets.
func (c Conflict) Why() string {
	list := slices.Clone(c.Destinations)
	for _, p := range c.Exempt {
		list = append(list, p.String())
	}
	if c.More {
		list = append(list, "others")
	}
	if len(list) == 0 {
		list = []string{"any destination"}
	}
	why, means := "rewrites the source of connections to "+strings.Join(list, ", "), ""
	if c.Kind == Exempts {
		why = either(c.Returns, "returns ", "accepts ") + strings.Join(list, ", ")
		means = c.exemptsWhat(len(list) > 1 || c.More)
	}
	if c.Kind == Translates {
		means = ", so this agent does not masquerade them"
	}
	if c.Source != "" {
		why += " from " + c.Source
	}
	if len(c.Conditions) > 0 {
		why += " where " + strings.Join(c.Conditions, ", ")
	}
	return why + means
}

// exemptsWhat says what comes of a rule of the kind Exempts.
func (c Conflict) exemptsWhat(many bool) string {
	switch {
	case c.Shared:
		return " before the jump to this agent's chain, so these connections are not masqueraded"
	case len(c.Destinations) == 0:
		return ", which no longer exempts these connections"
	case c.Source != "" || len(c.Conditions) > 0:
		return ", which no longer exempts " + either(many, "them", "it")
	}
	return ", which no longer exempts " + either(many, "them: add them", "it: add it") + " to nonMasqueradeCIDRs"
}

func either(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// Conflicts finds the rules, other than ours, that can rewrite the source address
// of connections to the exempt destinations. It goes through the chains as a
// packet does. A condition that it knows nothing of may hold or not. Known to be
// harmless and left out are the masquerades of kube-proxy and of the CNI plugin
// portmap, which act on packets that these have marked for it, and those of a
// connection from an address to itself.
//
// The order is that in which packets meet the rules, family by family.
func Conflicts(s Snapshot, exempt []netip.Prefix) []Conflict { return conflicts(s, exempt, nil) }

// conflicts finds conflicts, or instead of them all rewrites.
func conflicts(s Snapshot, exempt []netip.Prefix, rewrites *[]Rewrite) []Conflict {
	w := walker{sets: map[id][]iprange.Range{}, found: map[ruleID]int{}, rewrites: rewrites}
	w.exempt, w.prefixes = exemptions(exempt)
	w.index(s)
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Hook != nil && !c.Own {
			w.base, w.visits = c.Chain, map[id]int{}
			w.walk(c, w.anything())
		}
	}
	return w.conflicts
}

type ruleID struct {
	id
	handle uint64
}

type walker struct {
	chains   map[id]*Chain
	unnamed  map[id][]*Chain // by table: chains that no rule leads to
	sets     map[id][]iprange.Range
	exempt   []iprange.Range // sorted, none overlaps another
	prefixes []netip.Prefix  // the same

	// Of a search for rules that overrule the policy.
	kind    Kind
	share   Share
	sources []iprange.Range // nil: any
	jumped  bool            // the base chain has the jump of an agent

	base      nfnetlink.Chain
	visits    map[id]int // of a chain from this base chain
	conflicts []Conflict
	found     map[ruleID]int

	rewrites *[]Rewrite // nil: not asked for
}

// exemptions sorts prefixes and drops those that another covers.
func exemptions(exempt []netip.Prefix) (ranges []iprange.Range, prefixes []netip.Prefix) {
	sorted := slices.Clone(exempt)
	slices.SortFunc(sorted, func(a, b netip.Prefix) int {
		if c := a.Masked().Addr().Compare(b.Masked().Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	for _, p := range sorted {
		r := iprange.Of(p)
		if n := len(ranges); n == 0 || ranges[n-1].To.Less(r.From) {
			ranges, prefixes = append(ranges, r), append(prefixes, p.Masked())
		}
	}
	return ranges, prefixes
}

func (w *walker) index(s Snapshot) {
	named := make(map[id]bool, len(s.Chains))
	w.chains = make(map[id]*Chain, len(s.Chains))
	for i := range s.Chains {
		c := &s.Chains[i]
		w.chains[chainID(c.Chain)] = c
		for _, r := range c.Rules {
			if chain, ok := jump(r); ok {
				named[id{c.Family, c.Table, chain}] = true
			}
		}
	}
	w.unnamed = map[id][]*Chain{}
	for i := range s.Chains {
		if c := &s.Chains[i]; c.Hook == nil && !named[chainID(c.Chain)] {
			table := id{c.Family, c.Table, ""}
			w.unnamed[table] = append(w.unnamed[table], c)
		}
	}
	for _, set := range s.Sets {
		w.sets[id{set.Family, set.Table, set.Name}] = set.Ranges
	}
}
