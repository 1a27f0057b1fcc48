package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft/nfnetlink"
)

// TableName is the name of our table in mode nftables.
const TableName = "nft-masq-agent"

// A Ruleset is a compiled policy: exactly what the kernel should have. [Compile] and [CompilePolicy] create it. With
// the zero value no rules are wanted.
type Ruleset struct {
	Policy Policy
	Layout Layout // nil: no rules are wanted
	Tables []Table
	digest digest // of the policy
}

// Hash returns eight hex digits that identify the policy: rulesets
// with the same digits mean the same, regardless of the order and format of their
// files, the mode and the chain's name.
func (r Ruleset) Hash() string { return r.digest.String() }

// Same reports whether the kernel should have the same for both.
func (r Ruleset) Same(o Ruleset) bool {
	return r.SamePolicy(o) && r.Policy.samePresent(o.Policy)
}

// SamePolicy reports whether both are written for the same policy in the same way, whatever addresses the node has.
func (r Ruleset) SamePolicy(o Ruleset) bool {
	return r.digest == o.digest && r.Layout == o.Layout &&
		(r.Mode() != ModeIPTables || r.String() == o.String()) // the order of the rules is that of the file
}

// Mode returns the name of the layout, "" if no rules are wanted.
func (r Ruleset) Mode() Mode {
	if r.Layout == nil {
		return ""
	}
	return r.Layout.Mode()
}

// Chain returns the name that the operator chose for our chain, "" if it cannot
// be chosen.
func (r Ruleset) Chain() string {
	if r.Layout == nil {
		return ""
	}
	return r.Layout.Chain()
}

// String returns the ruleset as a file for the program of its mode: for `nft -f`, which then replaces our table with
// exactly this, or for `iptables-restore --noflush`. It panics without a Layout.
func (r Ruleset) String() string { return r.Layout.Text(r.Tables) }

// CIDRs returns the number of effective entries of each family.
func (r Ruleset) CIDRs() (ipv4, ipv6 int) {
	for _, f := range r.Policy.Families {
		n := 0
		for _, condition := range f.Conditions {
			n += len(condition.Prefixes())
		}
		if f.IPv6 {
			ipv6 += n
		} else {
			ipv4 += n
		}
	}
	return ipv4, ipv6
}

// Elements returns the number of elements of all sets.
func (r Ruleset) Elements() (n int) {
	for _, t := range r.Tables {
		for _, s := range t.Sets {
			n += s.Len()
		}
	}
	return n
}

// A Table is a table in the kernel. That of mode nftables is ours; those of mode
// iptables-nft are shared with other programs.
type Table struct {
	Family   nfnetlink.Family
	Name     string
	Counters []string
	Sets     []Set
	Chains   []Chain
}

// Chain returns the chain with a name; if the table does not have it, one without rules.
func (t Table) Chain(name string) Chain {
	i := slices.IndexFunc(t.Chains, func(c Chain) bool { return c.Name == name })
	if i < 0 {
		return Chain{Name: name}
	}
	return t.Chains[i]
}

// Owns reports whether a chain is ours by its name: any in our table, whatever is wanted, and in tables that other
// programs use, too, the chains of the ruleset. Other rules that we once wrote there have our signature.
func (r Ruleset) Owns(c nfnetlink.Chain) bool {
	if c.Family == nfnetlink.Inet && c.Table == TableName {
		return true
	}
	return slices.ContainsFunc(r.Tables, func(t Table) bool {
		return t.Family == c.Family && t.Name == c.Table && slices.ContainsFunc(t.Chains, func(own Chain) bool {
			return own.Name == c.Name && own.Hook == nil
		})
	})
}

// HasTable reports whether the ruleset has chains in a table.
func (r Ruleset) HasTable(table nfnetlink.Table) bool {
	return slices.ContainsFunc(r.Tables, func(t Table) bool { return t.Family == table.Family && t.Name == table.Name })
}

// A Set is a set of prefixes, or a map if it has mappings, without the suffix -a or -b
// under which the kernel holds it.
type Set struct {
	Name     string
	IPv6     bool
	Comment  string
	Prefixes []netip.Prefix      // sorted, none covers another
	Mappings []nfnetlink.Mapping // sorted by their keys; not nil: the set is a map
	Verdicts bool                // the mappings lead to chains
	// Learned means that rules add its elements: pairs of an address and itself.
	Learned bool
}

// Set returns the set with a name; if the table does not have it, one without elements.
func (t Table) Set(name string) Set {
	i := slices.IndexFunc(t.Sets, func(s Set) bool { return s.Name == name })
	if i < 0 {
		return Set{Name: name}
	}
	return t.Sets[i]
}

// SameElements reports whether two sets have the same elements.
func (s Set) SameElements(o Set) bool {
	return slices.Equal(s.Prefixes, o.Prefixes) && slices.Equal(s.Mappings, o.Mappings)
}

// LearnedSize is how many elements a set can have that rules add, as nft has it by default.
const LearnedSize = 65535

// Len returns the number of elements; of those that rules add, none count.
func (s Set) Len() int { return len(s.Prefixes) + len(s.Mappings) }

// A Chain is a chain; with a hook it is a base chain.
type Chain struct {
	Name     string
	Hook     *nfnetlink.Hook
	Rules    []Rule
	Elements int // number of elements of maps that lead to it; 0: rules lead to it, or a hook
}

// A Rule is a list of statements, each with text and bytecode.
type Rule struct {
	Statements []Statement
	Comment    string // in mode iptables-nft a statement has the comment
}

// A Statement is a match or a statement of a rule.
type Statement struct {
	Text  string           // in the syntax of its mode: nft's or iptables'
	Exprs []nfnetlink.Expr // with the sets of [SideA]
}

// Sides maps the name of a set to its name in the kernel. With the zero value,
// all sets have [SideA].
type Sides map[string]string

// The suffixes of a set's name in the kernel. An update fills the set that no
// rule refers to.
const (
	SideA = "-a"
	SideB = "-b"
)

// String returns the rule in the syntax of its mode, without the chain.
func (r Rule) String() string {
	words := make([]string, 0, len(r.Statements)+1)
	for _, n := range r.Statements {
		if n.Text != "" {
			words = append(words, n.Text)
		}
	}
	if r.Comment != "" {
		words = append(words, fmt.Sprintf("comment %q", r.Comment))
	}
	return strings.Join(words, " ")
}
