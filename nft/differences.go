package nft

import (
	"bytes"
	"fmt"
	"slices"

	"nft-masq-agent/nft/nfnetlink"
)

// sameRule reports whether two rules do the same and have the same comment.
func sameRule(a, b nfnetlink.Rule) bool {
	return nfnetlink.Same(a.Exprs, b.Exprs) && bytes.Equal(a.UserData, b.UserData)
}

// SameRules reports whether two chains have the same rules in the same order.
func SameRules(a, b []nfnetlink.Rule) bool { return slices.EqualFunc(a, b, sameRule) }

// ruleKey is equal for the same rules.
func ruleKey(r nfnetlink.Rule) string { return nfnetlink.Key(r.Exprs) + string(r.UserData) }

// Differences returns the missing and the unexpected rules of a chain in the
// kernel, or that their order is wrong.
func (c Chain) Differences(place string, t Table, live Sides, got []nfnetlink.Rule) []string {
	wanted := c.Bytecode(t, live)
	if SameRules(wanted, got) {
		return nil
	}
	var diffs []string
	unmatched := map[string]int{}
	for _, r := range got {
		unmatched[ruleKey(r)]++
	}
	for i, w := range wanted {
		if key := ruleKey(w); unmatched[key] > 0 {
			unmatched[key]--
		} else {
			diffs = append(diffs, fmt.Sprintf("%s: missing rule: %s", place, c.Rules[i]))
		}
	}
	for _, r := range got {
		if key := ruleKey(r); unmatched[key] > 0 {
			unmatched[key]--
			diffs = append(diffs, fmt.Sprintf("%s: unexpected rule: %s", place, r.Name()))
		}
	}
	if len(diffs) == 0 {
		diffs = append(diffs, place+" has its rules in another order")
	}
	return diffs
}
