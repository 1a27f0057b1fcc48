package answer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
)

// A Diff is the output of diff.
type Diff struct {
	cli.Head
	// Before is the config in force, or the first file.
	Before Config `json:"before"`
	// After is the new config.
	After Config `json:"after"`
	// Changes of the config, by key.
	Changes []Change `json:"changes"`
	// Open connections that would get another translation, by the entry that would decide it; absent offline.
	Open []Retranslated `json:"changedConnections,omitempty"`
	// Unjudged counts open connections of which it is not known whether they would.
	Unjudged int `json:"unjudgedCount,omitempty"`
}

// A Change is a change of an entry of a list, or of a value.
type Change struct {
	// Key of the config.
	Key string `json:"key"`
	// Kind is added, removed or moved for an entry, and changed for a value.
	Kind string `json:"kind"`
	// Entry of a list.
	Entry string `json:"entry,omitempty"`
	// Old value, or old number of an entry that moved, from 1.
	Old string `json:"old,omitempty"`
	// New value, or new number of an entry that moved.
	New string `json:"new,omitempty"`
}

// String returns the change as text.
func (c Change) String() string {
	switch c.Kind {
	case "changed":
		return fmt.Sprintf("%s: %s → %s", c.Key, c.Old, c.New)
	case "moved":
		return fmt.Sprintf("%s: moved entry %s to %s: %s", c.Key, c.Old, c.New, c.Entry)
	}
	return fmt.Sprintf("%s: %s %s", c.Key, c.Kind, c.Entry)
}

// A Retranslated counts open connections that would get another translation.
type Retranslated struct {
	// Entry of the new policy that would decide.
	Entry string `json:"entry"`
	// Before is the verdict so far.
	Before nft.Verdict `json:"from"`
	// After is the new verdict. It may be the same, with another address.
	After nft.Verdict `json:"to"`
	// Count of connections.
	Count int `json:"count"`
	// Examples of them, at most three.
	Examples []Connection `json:"examples"`
}

// String returns the count as text.
func (c Retranslated) String() string {
	text := fmt.Sprintf("%s: %s → %s, by %s", Plural(c.Count, "open connection"), c.Before, c.After, c.Entry)
	if c.Before == c.After {
		text = fmt.Sprintf("%s: %s from another address than new ones, by %s", Plural(c.Count, "open connection"), c.After,
			c.Entry)
	}
	for i, x := range c.Examples {
		text += fmt.Sprintf("%s %s %s to %s", choose(i == 0, ", such as", ","), x.Protocol, x.Source, x.Destination)
	}
	return text
}

// NewDiff compares two policies.
func NewDiff(oldPolicy, newPolicy nft.Policy) Diff {
	d := Diff{Changes: []Change{}}
	d.Before.Hash = oldPolicy.Hash()
	d.After.Hash = newPolicy.Hash()
	_, hadIPv6 := oldPolicy.Family(true)
	_, hasIPv6 := newPolicy.Family(true)
	d.value(config.KeyEnableIPv6, fmt.Sprint(hadIPv6), fmt.Sprint(hasIPv6))
	old := entries(oldPolicy)
	current := entries(newPolicy)
	for _, e := range subtract(current, old) {
		d.Changes = append(d.Changes, Change{Key: e.Key, Kind: "added", Entry: e.Value})
	}
	for _, e := range subtract(old, current) {
		d.Changes = append(d.Changes, Change{Key: e.Key, Kind: "removed", Entry: e.Value})
	}
	d.moved(ruleNumbers(oldPolicy), ruleNumbers(newPolicy))
	d.value("source ports", sourcePorts(oldPolicy), sourcePorts(newPolicy))
	d.value(config.KeyDropInvalid, fmt.Sprint(oldPolicy.DropInvalid), fmt.Sprint(newPolicy.DropInvalid))
	slices.SortStableFunc(d.Changes, func(a, b Change) int { return cmp.Compare(a.Key, b.Key) })
	return d
}

func (d *Diff) value(key, old, current string) {
	if old != current {
		d.Changes = append(d.Changes, Change{Key: key, Kind: "changed", Old: old, New: current})
	}
}

// subtract returns the entries that are not in another list, each once.
func subtract(list, others []Entry) (remaining []Entry) {
	found := map[[2]string]bool{}
	for _, e := range others {
		found[[2]string{e.Key, e.Value}] = true
	}
	for _, e := range list {
		id := [2]string{e.Key, e.Value}
		if !found[id] {
			remaining = append(remaining, e)
		}
		found[id] = true
	}
	return remaining
}

// moved compares the order of snatRules, of which the first entry that matches applies. An entry that has another
// number only because others were added or removed did not move.
func (d *Diff) moved(old, current map[string]int) {
	oldOrder := order(old, current)
	for i, rule := range order(current, old) {
		if oldOrder[i] != rule && old[rule] != current[rule] {
			d.Changes = append(d.Changes, Change{
				Key: config.KeySNATRules, Kind: "moved", Entry: rule, Old: fmt.Sprint(old[rule]), New: fmt.Sprint(current[rule]),
			})
		}
	}
}

// ruleNumbers returns the number of each entry of snatRules, from 1.
func ruleNumbers(p nft.Policy) map[string]int {
	numbers := map[string]int{}
	for _, f := range p.Families {
		for _, r := range f.SNATRules() {
			numbers[r.String()] = r.Number
		}
	}
	return numbers
}

// order returns the entries that have a number in another list, too, by their number in this one.
func order(numbers, others map[string]int) (rules []string) {
	for rule := range numbers {
		if others[rule] > 0 {
			rules = append(rules, rule)
		}
	}
	slices.SortFunc(rules, func(a, b string) int { return cmp.Or(numbers[a]-numbers[b], strings.Compare(a, b)) })
	return rules
}

// A Retranslations counts the open connections that two policies translate differently. Its memory does not
// depend on the number of connections.
type Retranslations struct {
	// Unjudged counts connections of which it is not known whether the verdict changes.
	Unjudged int

	old, current *conntrack.Comparison
	changes      map[retranslation]*Retranslated
}

type retranslation struct {
	entry        judge.Entry
	old, current nft.Verdict
}

// NewRetranslations begins to count.
func NewRetranslations(old, current *conntrack.Comparison) *Retranslations {
	return &Retranslations{old: old, current: current, changes: map[retranslation]*Retranslated{}}
}

// Add counts an open connection if the new policy decides otherwise about it.
func (c *Retranslations) Add(e *conntrack.Entry) {
	if !e.Open() {
		return
	}
	old, oldFinding := c.old.Compare(e)
	current, currentFinding := c.current.Compare(e)
	if unjudged(old, oldFinding) || unjudged(current, currentFinding) {
		c.Unjudged++
		return
	}
	if old.Verdict == current.Verdict && !(oldFinding == conntrack.Agrees && currentFinding == conntrack.Contradicts) {
		return
	}
	key := retranslation{current.Entry, old.Verdict, current.Verdict}
	change := c.changes[key]
	if change == nil {
		change = &Retranslated{Entry: current.Entry.String(), Before: old.Verdict, After: current.Verdict}
		c.changes[key] = change
	}
	const limit = 3
	change.Count++
	if len(change.Examples) < limit {
		change.Examples = append(change.Examples, NewConnection(e))
	}
}

func unjudged(ruling judge.Ruling, finding conntrack.Finding) bool {
	return ruling.Verdict == "" || finding == conntrack.OnInterface
}

// List returns the counts, the largest first.
func (c *Retranslations) List() (counts []Retranslated) {
	for _, change := range c.changes {
		counts = append(counts, *change)
	}
	slices.SortFunc(counts, func(a, b Retranslated) int {
		return cmp.Or(b.Count-a.Count, cmp.Compare(a.Entry, b.Entry))
	})
	return counts
}

// HasChanges reports whether anything changes for packets.
func (d *Diff) HasChanges() bool { return len(d.Changes) > 0 }

// Print writes the output as text.
func (d *Diff) Print(t cli.Text) {
	cli.Lines(t, "", d.Changes)
	cli.Lines(t, "", d.Open)
	if d.Unjudged > 0 {
		t.Line("%s not judged", Plural(d.Unjudged, "open connection"))
	}
	if !d.HasChanges() {
		t.Line("no change")
	}
	cli.Lines(t, "", d.Notes)
	t.Line("%s → %s", cmp.Or(d.Before.Hash, "none"), d.After.Hash)
}
