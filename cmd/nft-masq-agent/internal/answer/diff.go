package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
)

// A Diff is the output of diff.
type Diff struct {
	reply.Head
	// Before is the config in force, or the first file.
	Before Config `json:"before"`
	// After is the new config.
	After Config `json:"after"`
	// Changes of verdicts.
	Changes []Change `json:"changes"`
	// Other changes, which do not affect verdicts.
	Other []string `json:"otherChanges"`
	// Kept are open connections with a source address that new ones do not get.
	Kept *Open `json:"kept,omitempty"`
}

// A Change is connections whose verdict changes.
type Change struct {
	// Family of the addresses.
	Family string `json:"family"`
	// FromNode means that the node itself sends them.
	FromNode bool `json:"fromNode"`
	// ReceivedOn are the interfaces on which the packets are received; absent for any.
	ReceivedOn interfaces `json:"receivedOn,omitzero"`
	// LeavingBy are the interfaces by which the packets leave; absent for any.
	LeavingBy interfaces `json:"leavingBy,omitzero"`
	// Sources are CIDRs.
	Sources []netip.Prefix `json:"sources"`
	// Destinations are CIDRs.
	Destinations []netip.Prefix `json:"destinations"`
	// Before is the verdict so far.
	Before nft.Verdict `json:"from"`
	// After is the new verdict.
	After nft.Verdict `json:"to"`
	// Open connections of pods; absent offline, or if the node itself sends them.
	Open *Open `json:"open,omitempty"`

	region judge.Region // to count connections
}

// An interfaces is the names of interfaces that a change concerns, or all except these.
// The opposite is true of the exceptions. The longest name that matches applies.
type interfaces struct {
	// Names of interfaces, or prefixes and *.
	Names []string `json:"names"`
	// But means all interfaces except these.
	But bool `json:"but"`
	// Exceptions from that.
	Exceptions []string `json:"exceptions,omitempty"`
}

func newInterfaces(n judge.Names) (i interfaces) {
	if n.All() {
		return i
	}
	i.Names, i.But = []string{}, n.Has("*")
	for _, p := range n {
		switch {
		case p.Name == "" || p.Name == "*":
		case p.In != i.But:
			i.Names = append(i.Names, p.Name)
		default:
			i.Exceptions = append(i.Exceptions, p.Name)
		}
	}
	return i
}

// String names the interfaces.
func (i interfaces) String() string {
	words := strings.Join(i.Names, ", ")
	switch {
	case i.But && words == "":
		words = "any interface"
	case i.But:
		words = "any interface except " + words
	}
	if len(i.Exceptions) > 0 {
		words += fmt.Sprintf(", but %s%s (the longest name decides)",
			either(i.But, "", "not "), strings.Join(i.Exceptions, ", "))
	}
	return words
}

// Open counts open connections.
type Open struct {
	// Connections is their number.
	Connections int `json:"count"`
	// Pods is the number of pods.
	Pods int `json:"podCount"`
	// AtMost means that the change depends on interfaces, which are not known of a
	// connection.
	AtMost bool `json:"atMost,omitempty"`

	pods map[netip.Addr]bool
}

// Add counts a connection of a pod.
func (o *Open) Add(pod netip.Addr) {
	if o.pods == nil {
		o.pods = map[netip.Addr]bool{}
	}
	o.pods[pod] = true
	o.Connections, o.Pods = o.Connections+1, len(o.pods)
}

// String returns the count as text.
func (o *Open) String() string {
	return fmt.Sprintf("%s%s of %s", either(o.AtMost, "at most ", ""),
		Plural(o.Connections, "open connection"), Plural(o.Pods, "pod"))
}

// CountOpen begins to count the open connections of pods in each change. The function
// that it returns is to be called for each of them.
func (d *Diff) CountOpen() func(src, dst netip.Addr) {
	wide := make([]judge.Region, len(d.Changes))
	for i, c := range d.Changes {
		var limited bool
		if wide[i], limited = c.region.OnAnyInterface(); !c.FromNode {
			d.Changes[i].Open = &Open{AtMost: limited}
		}
	}
	return func(src, dst netip.Addr) {
		for i, r := range wide {
			if r.Includes(nft.Connection{Src: src, Dst: dst}) {
				d.Changes[i].Open.Add(src)
			}
		}
	}
}

// NewDiff compares two policies.
func NewDiff(before, after nft.Policy) Diff {
	d := Diff{Changes: []Change{}, Other: []string{}}
	d.Before.Hash, d.After.Hash = before.Hash(), after.Hash()
	other := func(what string, of func(nft.Policy) string) {
		if b, a := of(before), of(after); b != a {
			d.Other = append(d.Other, fmt.Sprintf("%s: %s → %s", what, b, a))
		}
	}
	other("source ports", sourcePorts)
	other("exemptions of pods", enforcement)
	other("packets of pods without a connection, where connections are masqueraded", untranslated)
	for _, ipv6 := range []bool{false, true} {
		was, is := judge.RegionOf(before, ipv6), judge.RegionOf(after, ipv6)
		d.change(was.Minus(is), nft.Masqueraded, nft.Exempt)
		d.change(is.Minus(was), nft.Exempt, nft.Masqueraded)
		b, _ := before.Family(ipv6)
		a, _ := after.Family(ipv6)
		d.Other = append(d.Other, changedEntries(b.SNATRules, a.SNATRules)...)
		other("masqueraded "+familyName(ipv6)+" connections leave from", func(p nft.Policy) string {
			return leaveFrom(p, ipv6)
		})
	}
	slices.SortStableFunc(d.Changes, func(a, b Change) int {
		return a.Destinations[0].Addr().Compare(b.Destinations[0].Addr())
	})
	return d
}

func (d *Diff) change(regions []judge.Region, before, after nft.Verdict) {
	for _, r := range regions {
		c := Change{
			Family:   familyKey(r.Dst[0].From.Is6()),
			FromNode: !r.Origin.All() && r.Origin.Has(""), LeavingBy: newInterfaces(r.Out),
			Sources: iprange.Prefixes(r.Src), Destinations: iprange.Prefixes(r.Dst),
			Before: before, After: after, region: r,
		}
		if !c.FromNode {
			c.ReceivedOn = newInterfaces(r.Origin)
		}
		d.Changes = append(d.Changes, c)
	}
}

// leaveFrom names the source addresses of masqueraded connections that no entry of snatRules
// matches.
func leaveFrom(p nft.Policy, ipv6 bool) string {
	if listed := iprange.SetOf(p.SNATOf(ipv6).Prefixes()); len(listed) > 0 {
		return "those of " + addressList(listed) + " that the node has"
	}
	return "the address of the interface"
}

// changedEntries names entries of snatRules that were added or removed, and those that are
// in both lists in another order.
func changedEntries(before, after []nft.SNATRule) (lines []string) {
	line := func(what string, r nft.SNATRule) {
		lines = append(lines, fmt.Sprintf("%s, %s: %s: %s", config.KeySNATRules, familyName(r.CIDRs[0].Addr().Is6()), what,
			entryText(r)))
	}
	left, texts := slices.Clone(before), texts(before)
	var kept [][2]nft.SNATRule
	for _, r := range after {
		i := slices.Index(texts, r.String())
		if i < 0 {
			line(fmt.Sprintf("added entry %d", r.Place), r)
			continue
		}
		kept = append(kept, [2]nft.SNATRule{left[i], r})
		left, texts = slices.Delete(left, i, i+1), slices.Delete(texts, i, i+1)
	}
	for _, r := range left {
		line(fmt.Sprintf("removed entry %d", r.Place), r)
	}
	inOrder := slices.SortedFunc(slices.Values(kept), func(a, b [2]nft.SNATRule) int { return a[0].Place - b[0].Place })
	for i, r := range kept {
		if r[0].Place != inOrder[i][0].Place {
			line(fmt.Sprintf("moved entry %d to %d", r[0].Place, r[1].Place), r[1])
		}
	}
	return lines
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

func untranslated(p nft.Policy) string {
	return either(p.DropInvalid, "dropped", "leave with the pod's IP")
}

func enforcement(p nft.Policy) string {
	if p.Enforce == nil {
		return "not enforced"
	}
	return fmt.Sprintf("enforced except for marks %v", p.Enforce.Marks)
}

// Changed reports whether anything changes for packets.
func (d *Diff) Changed() bool { return len(d.Changes)+len(d.Other) > 0 }

// String names origin, interfaces, sources and destinations, as far as they matter, and
// the verdicts.
func (c Change) String() string {
	words := ""
	if c.FromNode {
		words = "sent by this node itself: "
	}
	if on := c.ReceivedOn.String(); on != "" {
		words += "received on " + on + ": "
	}
	if by := c.LeavingBy.String(); by != "" {
		words += "leaving by " + by + ": "
	}
	if c.Sources[0].Bits() > 0 {
		words += "from " + addresses(c.Sources) + " to "
	}
	words += fmt.Sprintf("%s: %s → %s", addresses(c.Destinations), c.Before, c.After)
	if c.Open != nil {
		words += "; " + c.Open.String()
	}
	return words
}

// addresses names a set of addresses of a family, or if that is shorter, all others.
func addresses(prefixes []netip.Prefix) string {
	set, all := iprange.SetOf(prefixes), iprange.All(prefixes[0].Addr().Is6())
	others := iprange.Subtract([]iprange.Range{all}, set)
	switch everything := "any " + familyName(all.From.Is6()) + " address"; {
	case len(others) == 0:
		return everything
	case len(others) < len(set):
		return everything + " except " + addressList(others)
	}
	return addressList(set)
}

// String returns the output as text.
func (d *Diff) String() string {
	var b strings.Builder
	lines(&b, "", texts(d.Changes)...)
	lines(&b, "", d.Other...)
	if d.Kept != nil {
		lines(&b, "", d.Kept.String()+" would keep another source address than new ones get")
	}
	if !d.Changed() {
		b.WriteString("no change\n")
	}
	lines(&b, "", texts(d.Notes)...)
	fmt.Fprintf(&b, "%s → %s\n", cmp.Or(d.Before.Hash, "none"), d.After.Hash)
	return b.String()
}
