package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
)

// TableName is the name of the table in mode nftables.
const TableName = "nft-masq-agent"

// A Ruleset is a compiled policy: what the kernel is to hold, no more and no
// less. [Compile] and [CompilePolicy] make them.
type Ruleset struct {
	Policy Policy
	Mode   Mode
	Chain  string // of mode iptables-nft
	Tables []Table
	digest digest // of the policy
}

// Hash gives eight hex digits over what the policy decides: two rulesets with
// the same digits decide alike, whatever the order and form of their files,
// the mode and the chain's name.
func (r Ruleset) Hash() string { return r.digest.String() }

// Same says whether the kernel is to hold the same for both.
func (r Ruleset) Same(o Ruleset) bool {
	return r.digest == o.digest && r.Mode == o.Mode && r.Chain == o.Chain &&
		(r.Mode == ModeNFTables || slices.EqualFunc(r.Policy.Families, o.Policy.Families, FamilyPolicy.sameOrder))
}

// CIDRs counts the entries of both families that decide.
func (r Ruleset) CIDRs() (ipv4, ipv6 int) {
	for _, f := range r.Policy.Families {
		n := 0
		for _, s := range f.sets() {
			n += len(s.Prefixes)
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

// A Set is a set of prefixes, without the suffix -a or -b under which the
// kernel holds it.
type Set struct {
	Name     string
	IPv6     bool
	Comment  string
	Prefixes []netip.Prefix // sorted, none covers another
}

// A Chain is a base chain where it has a hook.
type Chain struct {
	Name  string
	Hook  *nfnetlink.Hook
	Rules []Rule
}

// A Rule is a list of statements, each with its text and its bytecode.
type Rule struct {
	Nodes   []node
	Comment string // in mode iptables-nft a node carries the comment
}

// A node is a match or a statement of a rule. The tree is closed: nodes.go and
// nodes_xt.go hold all there are.
type node interface {
	// String is the node in the language of its mode: nft's or iptables'.
	String() string
	// bytecode is what the kernel gets. sides says under which name it holds
	// a set.
	bytecode(family nfnetlink.Family, sides Sides) []nfnetlink.Expr
}

// Sides maps the name of a set to the one under which the kernel holds it; the
// zero value has it under [SideA].
type Sides map[string]string

func (s Sides) of(set string) string {
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

// String prints the ruleset as the file that its mode's program loads:
// `nft -f`, which then replaces our table by exactly this, whatever was there,
// or `iptables-restore --noflush`.
func (r Ruleset) String() string {
	if r.Mode == ModeIPTables {
		return saveText(r.Tables)
	}
	var b strings.Builder
	for _, t := range r.Tables {
		// The first line lets the second succeed where there is no table.
		fmt.Fprintf(&b, "table %s %s\ndelete table %[1]s %s\n", t.Family, t.Name)
		t.write(&b)
	}
	return b.String()
}

func (t Table) write(b *strings.Builder) {
	fmt.Fprintf(b, "table %s %s {\n", t.Family, t.Name)
	for _, c := range t.Counters {
		fmt.Fprintf(b, "\tcounter %s {\n\t\tpackets 0 bytes 0\n\t}\n\n", c)
	}
	for _, s := range t.Sets {
		s.write(b)
	}
	for i, c := range t.Chains {
		if i > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(b, "\tchain %s {\n", c.Name)
		if c.Hook != nil {
			fmt.Fprintf(b, "\t\ttype %s hook postrouting priority %s; policy accept;\n", c.Hook.Type, priorityText(c.Hook.Priority))
		}
		for _, r := range c.Rules {
			fmt.Fprintf(b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
}

// priorityText is a priority as nft prints it.
func priorityText(p int32) string {
	if p < srcNAT {
		return fmt.Sprintf("srcnat - %d", srcNAT-p)
	}
	return fmt.Sprintf("srcnat + %d", p-srcNAT)
}

func (s Set) write(b *strings.Builder) {
	fmt.Fprintf(b, "\tset %s%s {\n\t\ttype %s\n\t\tflags interval\n\t\tcomment %q\n", s.Name, SideA, s.typeName(), s.Comment)
	b.WriteString("\t\telements = { ")
	perLine := 2
	for i, p := range s.Prefixes {
		switch {
		case i == 0:
		case i%perLine == 0:
			b.WriteString(",\n\t\t\t     ")
		default:
			b.WriteString(", ")
		}
		b.WriteString(iprange.Of(p).String())
	}
	b.WriteString(" }\n\t}\n\n")
}

func (s Set) typeName() string {
	if s.IPv6 {
		return "ipv6_addr"
	}
	return "ipv4_addr"
}
