package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft/nfnetlink"
)

// TableName is the name of the table in mode nftables, which is ours alone.
const TableName = "nft-masq-agent"

// A Ruleset is a compiled policy: what the kernel is to hold, no more and no
// less. [Compile] and [CompilePolicy] make them.
type Ruleset struct {
	Policy Policy
	Layout Layout // nil: nothing is wanted
	Tables []Table
	digest digest // of the policy
}

// Hash gives eight hex digits over what the policy decides: two rulesets with
// the same digits decide alike, whatever the order and form of their files,
// the mode and the chain's name.
func (r Ruleset) Hash() string { return r.digest.String() }

// Same says whether the kernel is to hold the same for both.
func (r Ruleset) Same(o Ruleset) bool {
	return r.digest == o.digest && r.Layout == o.Layout && r.Policy.samePresent(o.Policy) &&
		(r.Layout == nil || !r.Layout.Ordered() || slices.EqualFunc(r.Policy.Families, o.Policy.Families, FamilyPolicy.sameOrder))
}

// Mode returns the name of the layout, "" where nothing is wanted.
func (r Ruleset) Mode() Mode {
	if r.Layout == nil {
		return ""
	}
	return r.Layout.Mode()
}

// Chain returns the name that the operator chose for our chain, "" where there is
// no choice.
func (r Ruleset) Chain() string {
	if r.Layout == nil {
		return ""
	}
	return r.Layout.Chain()
}

// Check says why the kernel cannot hold the ruleset.
func (r Ruleset) Check() error { return r.Layout.CheckTables(r.Tables) }

// String prints the ruleset as the file that its mode's program loads:
// `nft -f`, which then replaces our table by exactly this, whatever was there,
// or `iptables-restore --noflush`.
func (r Ruleset) String() string { return r.Layout.Text(r.Tables) }

// CIDRs counts the entries of both families that decide.
func (r Ruleset) CIDRs() (ipv4, ipv6 int) {
	for _, f := range r.Policy.Families {
		n := 0
		for _, q := range f.Questions {
			n += len(q.Prefixes())
		}
		if f.IPv6 {
			ipv6 += n
		} else {
			ipv4 += n
		}
	}
	return ipv4, ipv6
}

// A Table is ours where all that is in it is ours; the tables of mode
// iptables-nft are shared with everybody.
type Table struct {
	Family   nfnetlink.Family
	Name     string
	Counters []string
	Sets     []Set
	Chains   []Chain
}

// Chain gives the chain of a name, one without rules where the table has none.
func (t Table) Chain(name string) Chain {
	i := slices.IndexFunc(t.Chains, func(c Chain) bool { return c.Name == name })
	if i < 0 {
		return Chain{Name: name}
	}
	return t.Chains[i]
}

// A Set is a set of prefixes, or a map if it has mappings, without the suffix -a or -b
// under which the kernel holds it.
type Set struct {
	Name     string
	IPv6     bool
	Comment  string
	Prefixes []netip.Prefix      // sorted, none covers another
	Mappings []nfnetlink.Mapping // by their keys
}

// Len is how many elements it has.
func (s Set) Len() int { return len(s.Prefixes) + len(s.Mappings) }

// A Chain is a base chain where it has a hook.
type Chain struct {
	Name  string
	Hook  *nfnetlink.Hook
	Rules []Rule
}

// A Rule is a list of statements, each with its text and its bytecode.
type Rule struct {
	Nodes   []Node
	Comment string // in mode iptables-nft a node carries the comment
}

// A Node is a match or a statement of a rule. Each layout has its own.
type Node interface {
	// String is the node in the language of its mode: nft's or iptables'.
	String() string
	// Bytecode is what the kernel gets. sides says under which name it holds
	// a set.
	Bytecode(family nfnetlink.Family, sides Sides) []nfnetlink.Expr
}

// Sides maps the name of a set to the one under which the kernel holds it; the
// zero value has it under [SideA].
type Sides map[string]string

// Of returns the name under which the kernel holds a set.
func (s Sides) Of(set string) string {
	if name, ok := s[set]; ok {
		return name
	}
	return set + SideA
}

// The names under which a set is held end in one of these. An update fills the
// side of a set that no rule refers to.
const (
	SideA = "-a"
	SideB = "-b"
)

// String is the rule in the language of its mode, without the chain.
func (r Rule) String() string {
	words := make([]string, 0, len(r.Nodes)+1)
	for _, n := range r.Nodes {
		if w := n.String(); w != "" {
			words = append(words, w)
		}
	}
	if r.Comment != "" {
		words = append(words, fmt.Sprintf("comment %q", r.Comment))
	}
	return strings.Join(words, " ")
}
