package judge

import (
	"cmp"
	"slices"
	"strings"

	"nft-masq-agent/config"
)

// Names is a set of names of network interfaces: patterns of which the last one that
// matches a name applies, which is the longest. A name that none matches is not in the
// set. Equal sets that [Names.Minus] returned are equal slices.
type Names []Pattern

// A Pattern is a name, or with a trailing "*" all names that begin with it.
type Pattern struct {
	Name string
	In   bool // whether the names are in the set
}

// allNames returns the set of all names, and of the empty one.
func allNames() Names { return Names{{"*", true}} }

// noName returns the set of the empty name: what the node itself sends was received on
// an interface without a name.
func noName() Names { return Names{{"", true}} }

func namesOf(list []config.Interface) Names {
	n := make(Names, len(list))
	for i, entry := range list {
		n[i] = Pattern{entry.Name, true}
	}
	return n
}

// order sorts a pattern before those that it contains.
func (p Pattern) order() string {
	if prefix, several := strings.CutSuffix(p.Name, "*"); several {
		return prefix
	}
	return p.Name + "\x00"
}

// Has reports whether a name is in the set, or all names of a pattern that the longer
// patterns of the set do not match. "*" stands for a name that none of them matches.
func (n Names) Has(name string) bool {
	for _, p := range slices.Backward(n) {
		if (config.Interface{Name: p.Name}).Matches(name) {
			return p.In
		}
	}
	return false
}

// Minus returns the names that are not in o.
func (n Names) Minus(o Names) (left Names) {
	patterns := slices.Concat(n, o)
	slices.SortFunc(patterns, func(a, b Pattern) int { return cmp.Compare(a.order(), b.order()) })
	for _, p := range patterns {
		if in := n.Has(p.Name) && !o.Has(p.Name); in != left.Has(p.Name) {
			left = append(left, Pattern{p.Name, in})
		}
	}
	return left
}

// And returns the names that are in both sets.
func (n Names) And(o Names) Names { return n.Minus(n.Minus(o)) }
