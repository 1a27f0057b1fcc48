package nft

import (
	"bytes"
	"fmt"
	"slices"

	"nft-masq-agent/nft/facts"
	"nft-masq-agent/nft/nfnetlink"
)

// sameRule reports whether two rules do the same and have the same comment.
func sameRule(a, b nfnetlink.Rule) bool {
	return nfnetlink.Same(a.Exprs, b.Exprs) && bytes.Equal(a.UserData, b.UserData)
}

// ruleKey is equal for the same rules.
func ruleKey(r nfnetlink.Rule) string { return nfnetlink.Key(r.Exprs) + string(r.UserData) }

// Differences returns the missing and the unexpected rules of a chain in the
// kernel, or that their order is wrong.
func (c Chain) Differences(where string, t Table, live Sides, got []nfnetlink.Rule, words facts.Words) []string {
	wanted := c.Bytecode(t, live)
	if slices.EqualFunc(wanted, got, sameRule) {
		return nil
	}
	head, tail := sameEnds(wanted, got)
	var diffs []string
	unmatched := map[string]int{}
	for _, r := range got[head : len(got)-tail] {
		unmatched[ruleKey(r)]++
	}
	for i, w := range wanted[head : len(wanted)-tail] {
		if key := ruleKey(w); unmatched[key] > 0 {
			unmatched[key]--
		} else {
			diffs = append(diffs, fmt.Sprintf("%s: missing rule: %s", where, c.Rules[head+i]))
		}
	}
	for _, r := range got[head : len(got)-tail] {
		if key := ruleKey(r); unmatched[key] > 0 {
			unmatched[key]--
			diffs = append(diffs, fmt.Sprintf("%s: unexpected rule: %s", where, words.Of(r)))
		}
	}
	if len(diffs) == 0 {
		diffs = append(diffs, where+" has its rules in another order")
	}
	return diffs
}

// sameEnds returns how many rules at the beginning of two lists are the same, and how
// many of the others at the end.
func sameEnds(a, b []nfnetlink.Rule) (head, tail int) {
	for head < min(len(a), len(b)) && sameRule(a[head], b[head]) {
		head++
	}
	for tail < min(len(a), len(b))-head && sameRule(a[len(a)-1-tail], b[len(b)-1-tail]) {
		tail++
	}
	return head, tail
}
