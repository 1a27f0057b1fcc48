package answer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/iprange"
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
	Open []Changed `json:"changedConnections,omitempty"`
	// NotJudged counts open connections of which it is not known whether they would, by reason; absent offline.
	NotJudged []Unjudged `json:"notJudged,omitempty"`
}

// An Unjudged counts connections that were not judged.
type Unjudged struct {
	// Reason is that of the metric nft_masq_agent_unjudged_connections, such as interface: an entry does not show by which
	// one the packets leave.
	Reason string `json:"reason"`
	// Count of connections.
	Count int `json:"count"`
}

// A Change is a change of an entry of a list, or of a value.
type Change struct {
	// Key of the config.
	Key string `json:"key"`
	// Kind is added, removed or moved for an entry, and changed for a value.
	Kind string `json:"kind"`
	// Entry of a list.
	Entry string `json:"entry,omitempty"`
	// Old value, or old place of an entry that moved.
	Old string `json:"old,omitempty"`
	// New value, or new place of an entry that moved.
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

// A Changed counts open connections that would get another translation.
type Changed struct {
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
func (c Changed) String() string {
	text := fmt.Sprintf("%s: %s → %s, by %s", Plural(c.Count, "open connection"), c.Before, c.After, c.Entry)
	if c.Before == c.After {
		text = fmt.Sprintf("%s: %s from another address than new ones, by %s", Plural(c.Count, "open connection"), c.After,
			c.Entry)
	}
	for i, x := range c.Examples {
		text += fmt.Sprintf("%s %s %s to %s", either(i == 0, ", such as", ","), x.Protocol, x.Source, x.Destination)
	}
	return text
}

// NewDiff compares two policies.
func NewDiff(before, after nft.Policy) Diff {
	d := Diff{Changes: []Change{}}
	d.Before.Hash = before.Hash()
	d.After.Hash = after.Hash()
	for _, ipv6 := range []bool{false, true} {
		old, was := before.Family(ipv6)
		family, is := after.Family(ipv6)
		if ipv6 && was != is {
			d.value("enableIPv6", fmt.Sprint(was), fmt.Sprint(is))
			continue // all entries of the family come or go with it
		}
		d.family(old, family)
	}
	d.value("source ports", sourcePorts(before), sourcePorts(after))
	d.value(config.KeyEnforceNonMasquerade, enforcement(before), enforcement(after))
	d.value(config.KeyDropInvalid, fmt.Sprint(before.DropInvalid), fmt.Sprint(after.DropInvalid))
	return d
}

func (d *Diff) value(key, old, current string) {
	if old != current {
		d.Changes = append(d.Changes, Change{Key: key, Kind: "changed", Old: old, New: current})
	}
}

// family compares the lists of a family. Lists of interfaces are the same in both families.
func (d *Diff) family(before, after nft.FamilyPolicy) {
	old := map[string]nft.Question{}
	for _, q := range before.Questions {
		old[q.Key] = q
	}
	for _, q := range after.Questions {
		d.question(q.Key, old[q.Key], q, after.IPv6)
		delete(old, q.Key)
	}
	for _, key := range slices.Sorted(maps.Keys(old)) {
		d.question(key, old[key], nft.Question{}, after.IPv6)
	}
	d.entries(config.KeySNATAddresses, config.Texts(before.SNAT.CIDRs), config.Texts(after.SNAT.CIDRs))
	d.snatRules(before.SNATRules, after.SNATRules)
}

func (d *Diff) question(key string, before, after nft.Question, ipv6 bool) {
	d.entries(key, config.Texts(before.CIDRs), config.Texts(after.CIDRs))
	if ipv6 {
		return
	}
	d.entries(key, config.Names(before.Interfaces), config.Names(after.Interfaces))
	row := cmp.Or(before.Row.Asks, after.Row.Asks)
	if row == config.SentByNode && before.Key != after.Key { // a condition without a list
		d.value(key, fmt.Sprint(before.Key == ""), fmt.Sprint(after.Key == ""))
	}
}

// entries compares lists of which the order does not matter.
func (d *Diff) entries(key string, before, after []string) {
	old := map[string]bool{}
	for _, entry := range before {
		old[entry] = true
	}
	current := map[string]bool{}
	for _, entry := range after {
		current[entry] = true
		if !old[entry] {
			d.Changes = append(d.Changes, Change{Key: key, Kind: "added", Entry: entry})
		}
	}
	for _, entry := range before {
		if !current[entry] {
			d.Changes = append(d.Changes, Change{Key: key, Kind: "removed", Entry: entry})
		}
	}
}

// snatRules compares lists of which the first entry that matches applies: entries that are in both may have moved
// beside each other.
func (d *Diff) snatRules(before, after []nft.SNATRule) {
	add := func(kind string, r nft.SNATRule) {
		d.Changes = append(d.Changes, Change{Key: config.KeySNATRules, Kind: kind, Entry: entryText(r)})
	}
	remaining := slices.Clone(before)
	var kept [][2]nft.SNATRule
	for _, r := range after {
		i := slices.IndexFunc(remaining, func(o nft.SNATRule) bool { return o.String() == r.String() })
		if i < 0 {
			add("added", r)
			continue
		}
		kept = append(kept, [2]nft.SNATRule{remaining[i], r})
		remaining = slices.Delete(remaining, i, i+1)
	}
	for _, r := range remaining {
		add("removed", r)
	}
	inOrder := slices.SortedFunc(slices.Values(kept), func(a, b [2]nft.SNATRule) int { return a[0].Place - b[0].Place })
	for i, pair := range kept {
		if pair[0].Place != inOrder[i][0].Place {
			d.Changes = append(d.Changes, Change{
				Key: config.KeySNATRules, Kind: "moved", Entry: entryText(pair[1]), Old: fmt.Sprint(pair[0].Place),
				New: fmt.Sprint(pair[1].Place),
			})
		}
	}
}

// entryText describes an entry of snatRules, with the first of its addresses.
func entryText(r nft.SNATRule) string {
	text := ""
	for _, l := range []struct {
		word string
		nft.List
	}{{"from ", r.From}, {"to ", r.To}} {
		if len(l.CIDRs) > 0 {
			text += l.word + addressList(iprange.SetOf(l.Prefixes())) + " "
		}
	}
	if len(r.Out) > 0 {
		text += "by " + strings.Join(config.Names(r.Out), ", ") + " "
	}
	return text + "leaves from " + addressList(iprange.SetOf(r.Prefixes()))
}

func enforcement(p nft.Policy) string {
	if p.Enforce == nil {
		return "false"
	}
	return fmt.Sprintf("true, except for marks %v", p.Enforce.Marks)
}

// A ChangedCount counts the open connections that two policies translate differently. Its memory does not depend on the number
// of connections.
type ChangedCount struct {
	before, after *conntrack.Comparison
	changes       map[changedKey]*Changed
	notJudged     map[conntrack.Finding]int
}

type changedKey struct {
	entry         judge.Entry
	before, after nft.Verdict
}

// NewChangedCount begins to count.
func NewChangedCount(before, after *conntrack.Comparison) *ChangedCount {
	return &ChangedCount{before, after, map[changedKey]*Changed{}, map[conntrack.Finding]int{}}
}

// Add counts a connection if the new policy decides otherwise about it, and by reason if that is not known.
func (c *ChangedCount) Add(e *conntrack.Entry) {
	old, was := c.before.Compare(e)
	current, is := c.after.Compare(e)
	for _, side := range []struct {
		verdict nft.Verdict
		finding conntrack.Finding
	}{{old.Verdict, was}, {current.Verdict, is}} {
		if side.verdict == "" || side.finding == conntrack.OnInterface || side.finding == conntrack.Closed {
			c.notJudged[side.finding]++
			return
		}
	}
	if old.Verdict == current.Verdict && !(was == conntrack.Agrees && is == conntrack.Contradicts) {
		return
	}
	key := changedKey{current.Entry, old.Verdict, current.Verdict}
	change := c.changes[key]
	if change == nil {
		change = &Changed{Entry: current.Entry.String(), Before: old.Verdict, After: current.Verdict}
		c.changes[key] = change
	}
	const limit = 3
	change.Count++
	if len(change.Examples) < limit {
		change.Examples = append(change.Examples, NewConnection(e, nil, conntrack.History{}))
	}
}

// List returns the counts, the largest first.
func (c *ChangedCount) List() (all []Changed) {
	for _, change := range c.changes {
		all = append(all, *change)
	}
	slices.SortFunc(all, func(a, b Changed) int {
		return cmp.Or(b.Count-a.Count, cmp.Compare(a.Entry, b.Entry), cmp.Compare(a.Before, b.Before))
	})
	return all
}

// NotJudged returns how many connections were not judged, by reason, the largest number first.
func (c *ChangedCount) NotJudged() (all []Unjudged) {
	for finding, n := range c.notJudged {
		all = append(all, Unjudged{finding.String(), n})
	}
	slices.SortFunc(all, func(a, b Unjudged) int { return cmp.Or(b.Count-a.Count, cmp.Compare(a.Reason, b.Reason)) })
	return all
}

// Changed reports whether anything changes for packets.
func (d *Diff) Changed() bool { return len(d.Changes) > 0 }

// String returns the output as text.
func (d *Diff) String() string {
	var b strings.Builder
	lines(&b, "", texts(d.Changes)...)
	lines(&b, "", texts(d.Open)...)
	if len(d.NotJudged) > 0 {
		total := 0
		var reasons []string
		for _, n := range d.NotJudged {
			total += n.Count
			reasons = append(reasons, fmt.Sprintf("%s: %d", n.Reason, n.Count))
		}
		lines(&b, "", fmt.Sprintf("%s not judged (%s)", Plural(total, "open connection"), strings.Join(reasons, ", ")))
	}
	if !d.Changed() {
		b.WriteString("no change\n")
	}
	lines(&b, "", texts(d.Notes)...)
	fmt.Fprintf(&b, "%s → %s\n", cmp.Or(d.Before.Hash, "none"), d.After.Hash)
	return b.String()
}
