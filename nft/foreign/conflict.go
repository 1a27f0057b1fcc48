package foreign

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Place is a rule of a base chain, or of a chain that is reached from one. A rule without
// a handle is the policy of the base chain.
type Place struct {
	Rule     nfnetlink.Rule
	Base     string // the base chain from which it is reached
	Priority int32  // of the base chain
}

// Table returns the family and name of the rule's table, as nft writes them.
func (p Place) Table() string {
	return p.Rule.Family.String() + " " + nfnetlink.Printable(p.Rule.Table)
}

// Chain returns the name of the rule's chain for use in messages.
func (p Place) Chain() string { return nfnetlink.Printable(p.Rule.Chain) }

// Policy reports whether it is no rule but the policy of the base chain, which is to drop.
func (p Place) Policy() bool { return p.Rule.Handle == 0 }

// RuleText returns the rule as text.
func (p Place) RuleText() string {
	if p.Policy() {
		return "policy drop"
	}
	return rule.String(p.Rule)
}

// A Conflict is a rule of another program that can override the configuration for
// some connections.
type Conflict struct {
	Kind Kind
	Place
	// Via are the rules that lead from the base chain to this one.
	Via []nfnetlink.Rule
	// Destinations are the first few that the rule matches, with More set if there are others.
	// For the kind Masquerades: the exempt prefixes that it matches, in whole or in part. For
	// the other kinds: the masqueraded destinations, none if it matches all.
	Destinations []string
	More         bool
	// Source describes the source addresses to which the rule is restricted,
	// empty if it is not. Conditions are its other conditions, and those of the
	// jumps leading to it.
	Source     string
	Conditions []string
	// For the kind Exempts: whether the rule returns rather than accepts, and whether the
	// policy has its jump in the same chain.
	Returns bool
	Shared  bool

	src       []iprange.Range // of the connections
	elsewhere bool            // they are no pods': received on other interfaces, or sent by the node
}

// maxNamed is the number of exempt prefixes that a conflict names.
const maxNamed = 8

// Packets returns the rule's packet counter, or nil if it has none.
func (c Conflict) Packets() *uint64 {
	if n, counts := facts.Packets(c.Rule); counts {
		return &n
	}
	return nil
}

// ViaText returns the rules that lead to it as text.
func (c Conflict) ViaText() []string {
	words := make([]string, len(c.Via))
	for i, r := range c.Via {
		words[i] = rule.String(r)
	}
	return words
}

// From reports whether the rule can match one of the sources, on the interfaces of pods.
func (c Conflict) From(sources []iprange.Range) bool {
	return !c.elsewhere && len(iprange.Intersect(c.src, sources)) > 0
}

// Hash distinguishes conflicts by what is reported about them. It ignores
// counters and the rule's handle, which changes when the rule is recreated.
func (c Conflict) Hash(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = fmt.Fprintf(&h, "%d %s %q %q %q %q %q %q %s", c.Kind, c.Rule.Family, c.Rule.Table, c.Rule.Chain, c.Base,
		c.Source, nfnetlink.Key(c.Rule.Exprs), c.Conditions, c.Destinations)
	return h.Sum64()
}

// Why describes what the rule does and to which packets.
func (c Conflict) Why() string {
	list := slices.Clone(c.Destinations)
	if c.More {
		list = append(list, "others")
	}
	if len(list) == 0 {
		list = []string{"any destination"}
	}
	why, means := "rewrites the source of connections to "+strings.Join(list, ", "), ""
	if c.Kind == Exempts {
		why = either(c.Returns, "returns ", "accepts ") + strings.Join(list, ", ")
		means = c.exemptsWhat(len(list) > 1)
	}
	switch c.Kind {
	case Untracks:
		why = "turns off connection tracking, and with it NAT, of connections to " + strings.Join(list, ", ")
	case Writes:
		why = "writes into the header of packets to " + strings.Join(list, ", ")
	case Drops:
		return "drops everything"
	case Translates:
		means = ", so this agent does not masquerade them"
	case Masquerades, Exempts:
	}
	if c.Source != "" {
		why += " from " + c.Source
	}
	if len(c.Conditions) > 0 {
		why += " where " + strings.Join(c.Conditions, ", ")
	}
	return why + means
}

// exemptsWhat describes the effect of a rule of the kind Exempts.
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

func either[T any](first bool, a, b T) T {
	if first {
		return a
	}
	return b
}

// hits names the first of w.dst that overlap with destinations; with parts, the overlaps.
func (w *finder) hits(dst []iprange.Range, parts bool) (hits []string, more bool) {
	for i, part := range w.overlaps(dst) {
		name := either(parts, part, w.dst[i]).String()
		switch {
		case len(hits) > 0 && hits[len(hits)-1] == name:
		case len(hits) == maxNamed:
			return hits, true
		default:
			hits = append(hits, name)
		}
	}
	return hits, false
}

// A finder finds conflicts.
type finder struct {
	*walker
	conflicts []Conflict
	found     map[ruleID]int // in conflicts
}

type ruleID struct {
	Kind
	id
	handle uint64
}

func newFinder(s Snapshot, origin judge.Names) *finder {
	return &finder{walker: newWalker(s, Packet{any: true, origin: origin}), found: map[ruleID]int{}}
}

// add completes a conflict and adds it to what was found.
func (w *finder) add(s step, conflict Conflict) {
	conflict.Place, conflict.Via = w.place(s.rule), s.via
	var from, words []string
	for _, c := range s.conditions {
		switch c.of {
		case source:
			from = append(from, c.from)
		case other, device:
			words = append(words, c.text)
		case destination:
		}
	}
	conflict.Source, conflict.Conditions = strings.Join(slices.Compact(from), ", "), slices.Compact(words)
	at := ruleID{conflict.Kind, chainID(s.chain.Chain), s.rule.Handle}
	if i, ok := w.found[at]; ok {
		w.conflicts[i].merge(conflict)
		return
	}
	w.found[at] = len(w.conflicts)
	w.conflicts = append(w.conflicts, conflict)
	w.full = len(w.conflicts) >= maxFound
}

// merge adds a second path to the same rule.
func (c *Conflict) merge(o Conflict) {
	for _, d := range o.Destinations {
		if !slices.Contains(c.Destinations, d) && len(c.Destinations) > 0 {
			c.Destinations = append(c.Destinations, d)
		}
	}
	if len(o.Destinations) == 0 {
		c.Destinations = nil
	}
	c.src = iprange.Normal(slices.Concat(c.src, o.src))
	c.More = c.More || o.More
	switch {
	case c.Source == "" || o.Source == "":
		c.Source = ""
	case c.Source != o.Source:
		c.Source += " or " + o.Source
	}
	if len(c.Source) > maxSource {
		c.Source = ""
	}
	c.Conditions = slices.DeleteFunc(slices.Clone(c.Conditions), func(s string) bool {
		return !slices.Contains(o.Conditions, s)
	})
}

// needed reports whether the connections need the translation to work: those from
// an address to itself, or from a loopback address out of the node.
func needed(p packets) bool {
	return !slices.ContainsFunc(p, func(b box) bool {
		src := b.src[0]
		self := slices.Equal(b.src, b.dst) && src.From == src.To
		return len(b.src) > 1 || !self && !(src.From.IsLoopback() && src.To.IsLoopback())
	})
}

// exemptions sorts prefixes and drops those covered by others.
func exemptions(exempt []netip.Prefix) (ranges []iprange.Range) {
	sorted := slices.Clone(exempt)
	slices.SortFunc(sorted, netip.Prefix.Compare)
	for _, p := range sorted {
		r := iprange.Of(p)
		if n := len(ranges); n == 0 || ranges[n-1].To.Less(r.From) {
			ranges = append(ranges, r)
		}
	}
	return ranges
}
