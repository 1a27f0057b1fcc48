package answer

import (
	"fmt"
	"net/netip"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Diff is the output of diff. As JSON, fields are only ever added.
type Diff struct {
	Agent   string   `json:"agent,omitempty"` // whose flags are used, as text
	Before  string   `json:"before"`          // hash
	After   string   `json:"after"`
	Changes []Change `json:"changes"`
	Other   []string `json:"other"`          // changes that do not affect verdicts
	Kept    *Open    `json:"kept,omitempty"` // connections with a source address that is not in the new snatAddresses
	Notes   []string `json:"notes"`
}

// A Change is connections whose verdict changes.
type Change struct {
	Family       string      `json:"family"`   // ipv4 or ipv6
	FromNode     bool        `json:"fromNode"` // sent by the node itself
	ReceivedOn   interfaces  `json:"receivedOn,omitzero"`
	LeavingBy    interfaces  `json:"leavingBy,omitzero"`
	Sources      []string    `json:"sources"`
	Destinations []string    `json:"destinations"`
	Before       nft.Verdict `json:"before"`
	After        nft.Verdict `json:"after"`
	Open         *Open       `json:"open,omitempty"` // none offline

	what string
}

// An interfaces is the names of interfaces that a change concerns, or all except
// these.
type interfaces struct {
	Names []string `json:"names"`
	But   bool     `json:"but"`
}

// Open counts the open connections that a change concerns.
type Open struct {
	Connections int `json:"connections"`
	Pods        int `json:"pods"`
}

// NewDiff compares two policies.
func NewDiff(before, after nft.Policy, flips []nft.Flip) Diff {
	d := Diff{Before: before.Hash(), After: after.Hash(), Changes: []Change{}, Other: []string{}, Notes: []string{}}
	for _, f := range flips {
		d.Changes = append(d.Changes, Change{
			Family:   strings.ToLower(familyName(f.IPv6)),
			FromNode: f.FromNode, ReceivedOn: interfaces(f.In), LeavingBy: interfaces(f.Out), Sources: texts(f.Sources), Destinations: texts(f.Destinations),
			Before: f.Before, After: f.After, what: flipText(f),
		})
	}
	if b, a := sourcePorts(before), sourcePorts(after); a != b {
		d.Other = append(d.Other, fmt.Sprintf("source ports: %s → %s", b, a))
	}
	if b, a := enforcement(before), enforcement(after); b != a {
		d.Other = append(d.Other, fmt.Sprintf("exemptions of pods: %s → %s", b, a))
	}
	for _, ipv6 := range []bool{false, true} {
		if b, a := leaveFrom(before, ipv6), leaveFrom(after, ipv6); b != a {
			d.Other = append(d.Other, fmt.Sprintf("masqueraded %s connections leave from: %s → %s", familyName(ipv6), b, a))
		}
	}
	return d
}

// leaveFrom words the source addresses of what is masqueraded.
func leaveFrom(p nft.Policy, ipv6 bool) string {
	prefixes := p.SNATOf(ipv6).Prefixes()
	if len(prefixes) == 0 {
		return "the address of the interface"
	}
	var words []string
	for _, p := range prefixes {
		words = append(words, config.CIDR{Prefix: p}.Text())
	}
	return "those of " + strings.Join(words, ", ") + " that the node has"
}

func enforcement(p nft.Policy) string {
	if p.Enforce == nil {
		return "not enforced"
	}
	return fmt.Sprintf("enforced except for marks %v", p.Enforce.Marks)
}

func sourcePorts(p nft.Policy) string {
	how := either(p.RandomFully, "random", "kept if possible")
	if len(p.Ports) == 0 {
		return how
	}
	return how + ", from " + strings.Join(texts(p.Ports), ",")
}

// Changed reports whether anything changes for packets.
func (d *Diff) Changed() bool { return len(d.Changes)+len(d.Other) > 0 }

// flipText names sources and destinations, or if that is shorter, all except the
// others.
func flipText(f nft.Flip) string {
	words := addresses(f.Destinations, f.OtherDestinations, f.IPv6)
	if len(f.OtherSources) > 0 {
		words = "from " + addresses(f.Sources, f.OtherSources, f.IPv6) + " to " + words
	}
	for _, i := range []struct {
		nft.Interfaces
		yes, no string
	}{{f.Out, "leaving by ", "leaving by any interface except "}, {f.In, "received on ", "received on any interface except "}} {
		switch {
		case len(i.Names) == 0:
		case i.But:
			words = i.no + strings.Join(i.Names, ", ") + ": " + words
		default:
			words = i.yes + strings.Join(i.Names, ", ") + ": " + words
		}
	}
	if f.FromNode {
		words = "sent by this node itself: " + words
	}
	return words
}

func addresses(these, others []netip.Prefix, ipv6 bool) string {
	switch {
	case len(others) == 0:
		return "any " + familyName(ipv6) + " address"
	case len(these) > 1 && len(others) < len(these):
		return "any " + familyName(ipv6) + " address except " + few(others)
	}
	return few(these)
}

// few lists the first CIDRs and counts the others.
func few(list []netip.Prefix) string {
	const most = 8
	if len(list) <= most+1 {
		return strings.Join(texts(list), ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(texts(list[:most]), ", "), len(list)-most)
}

// String returns the output as text.
func (d *Diff) String() string {
	var b strings.Builder
	for _, c := range d.Changes {
		line := fmt.Sprintf("%s: %s → %s", c.what, c.Before, c.After)
		if c.Open != nil {
			line += fmt.Sprintf("; %s of %s", Plural(c.Open.Connections, "open connection"), Plural(c.Open.Pods, "pod"))
		}
		b.WriteString(Line(line, ""))
	}
	for _, o := range d.Other {
		b.WriteString(Line(o, ""))
	}
	if d.Kept != nil {
		b.WriteString(Line(fmt.Sprintf("%s of %s would keep another source address than new ones get",
			Plural(d.Kept.Connections, "open connection"), Plural(d.Kept.Pods, "pod")), ""))
	}
	if !d.Changed() {
		b.WriteString("no change\n")
	}
	for _, n := range d.Notes {
		b.WriteString(Line(n, ""))
	}
	fmt.Fprintf(&b, "%s → %s\n", d.Before, d.After)
	if d.Agent != "" {
		b.WriteString(Line(d.Agent, ""))
	}
	return b.String()
}
