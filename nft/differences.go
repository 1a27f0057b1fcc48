package nft

import (
	"bytes"
	"fmt"
	"slices"

	"nft-masq-agent/nft/nfnetlink"
)

// A DifferenceKind is what is to be done about a difference.
type DifferenceKind int

// The kinds of differences.
const (
	Drift       DifferenceKind = iota // rules, sets and counters of ours are written again
	Unexpected                        // our table has something else: it is replaced
	Leftover                          // it is removed
	OlderAgents                       // rules of an iptables-based agent, which are removed
	Overwritten                       // what has our chain's name, which we did not write, is replaced
	Prevented                         // nothing can be written
)

// A Difference is one difference between the kernel and what is wanted.
type Difference struct {
	Kind DifferenceKind
	Text string
	Err  error // of kind Prevented
}

// String returns the difference in words.
func (d Difference) String() string {
	switch d.Kind {
	case Leftover:
		return "leftover " + d.Text
	case OlderAgents:
		return "another agent's " + d.Text
	case Drift, Unexpected, Overwritten, Prevented:
	}
	return d.Text
}

// SameRule reports whether two rules do the same and have the same comment.
func SameRule(a, b nfnetlink.Rule) bool {
	return nfnetlink.Same(a.Exprs, b.Exprs) && bytes.Equal(a.UserData, b.UserData)
}

// SameRules reports whether two chains have the same rules in the same order.
func SameRules(a, b []nfnetlink.Rule) bool { return slices.EqualFunc(a, b, SameRule) }

// Difference describes the first difference between the rules of a chain in the kernel and the
// wanted ones, which are in the kernel's form; "" if there is none.
func (c Chain) Difference(place string, wanted, got []nfnetlink.Rule, same func(a, b nfnetlink.Rule) bool) string {
	i := 0
	for i < min(len(wanted), len(got)) && same(wanted[i], got[i]) {
		i++
	}
	switch {
	case len(got) > len(wanted):
		return fmt.Sprintf("%s: unexpected rule: %s", place, got[i].Name())
	case i < len(wanted):
		return fmt.Sprintf("%s: missing rule: %s", place, c.Rules[i])
	}
	return ""
}
