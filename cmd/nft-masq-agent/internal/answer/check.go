package answer

import (
	"bufio"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Check is the output of check. With --strict a config with warnings is still accepted;
// only the exit code differs.
type Check struct {
	cli.Head
	// Config that was checked.
	Config Config `json:"config"`
	// Meaning of an accepted config.
	Meaning *meaning `json:"meaning,omitempty"`
}

// A meaning is what a valid config means.
type meaning struct {
	// RandomFully is false if source ports are kept where possible.
	RandomFully bool `json:"randomFully"`
	// ToPorts are the source ports, FIRST-LAST; absent if any.
	ToPorts string `json:"toPorts,omitempty"`
	// ResyncSeconds is the time between two complete comparisons of file and kernel.
	ResyncSeconds float64 `json:"resyncSeconds"`
	// MasqLinkLocal means that traffic to 169.254.0.0/16 is masqueraded.
	MasqLinkLocal bool `json:"masqLinkLocal"`
	// MasqLinkLocalIPv6 means that traffic to fe80::/10 is masqueraded.
	MasqLinkLocalIPv6 bool `json:"masqLinkLocalIPv6"`
	// EnableIPv6 is false if nothing of IPv6 is masqueraded.
	EnableIPv6 bool `json:"enableIPv6"`
	// Translation has the keys that control source address translation.
	Translation []givenReport `json:"translation,omitempty"`
	// Families are the lists of each address family.
	Families []familyReport `json:"families"`

	sourcePorts string // in words
	resync      time.Duration
}

// A givenReport is a value of a key and its position.
type givenReport struct {
	// Key of the config file.
	Key string `json:"key"`
	// Value of the key.
	Value string `json:"value"`
	origin

	means string // the key
}

// A familyReport is the lists of an address family.
type familyReport struct {
	// Family of the lists.
	Family string `json:"family"`
	// Lists in the order in which they are asked.
	Lists []listReport `json:"lists"`

	name, rest string // in words; the rest is what no list exempts, "" if there is none
}

// A listReport is a list with entries, or the position of a key without a list, which is false.
type listReport struct {
	// Key of the config file.
	Key string `json:"key"`
	// CIDRs of the list.
	CIDRs []cidrReport `json:"cidrs"`
	// Place of a key without a list.
	Place config.Position `json:"place,omitzero"`
	// Interfaces are the entries of a list of names.
	Interfaces []interfaceReport `json:"interfaces,omitempty"`

	means string
}

// An interfaceReport is an entry of a list of interfaces.
type interfaceReport struct {
	// Name of an interface, or a prefix and *.
	Name string `json:"name"`
	origin
}

// A cidrReport is a CIDR and its origin.
type cidrReport struct {
	// CIDR as written in the file.
	CIDR string `json:"cidr"`
	origin
}

// NewCheck reports a config, which is not accepted if there is an error.
func NewCheck(h cli.Head, o cli.Options, l Loaded, err error) Check {
	r := Check{Head: h, Config: NewConfig(o, l, err)}
	r.Take(config.ProblemsOf(err))
	r.Take(l.Problems.Remarks())
	if err == nil {
		r.Take(Lint(l.Ruleset.Policy, o.PodCIDRs))
		r.Meaning = meaningOf(l.Config, l.Ruleset.Policy)
	}
	return r
}

func meaningOf(c config.Config, p nft.Policy) *meaning {
	m := &meaning{
		RandomFully: p.RandomFully, ToPorts: portRanges(p.Ports), ResyncSeconds: c.ResyncInterval.Seconds(),
		MasqLinkLocal: c.MasqLinkLocal, MasqLinkLocalIPv6: c.MasqLinkLocalIPv6, EnableIPv6: c.EnableIPv6,
		sourcePorts: sourcePorts(p), resync: c.ResyncInterval,
	}
	for _, t := range config.Translations() {
		for _, given := range t.Values(c) {
			m.Translation = append(m.Translation, givenReport{t.Key, given.Text, originOf(given.Pos), t.Means})
		}
	}
	for _, f := range p.Families {
		r := familyReport{
			Family: familyKey(f.IPv6), Lists: make([]listReport, len(f.Questions)),
			name: familyName(f.IPv6), rest: restOf(c, f),
		}
		for i, q := range f.Questions {
			r.Lists[i] = reportList(q)
		}
		m.Families = append(m.Families, r)
	}
	return m
}

func reportList(q nft.Question) listReport {
	r := listReport{Key: q.Key, CIDRs: make([]cidrReport, len(q.CIDRs)), means: q.Means}
	if q.Asks == config.SentByNode {
		r.Place = q.At
	}
	for _, i := range q.Interfaces {
		r.Interfaces = append(r.Interfaces, interfaceReport{i.Name, originOf(i.Pos)})
	}
	for i, c := range q.CIDRs {
		r.CIDRs[i] = cidrReport{c.String(), originOf(c.Pos)}
	}
	return r
}

// restOf says what happens to destinations of a family that no list exempts.
func restOf(c config.Config, f nft.FamilyPolicy) string {
	exempt := f.List(config.KeyNonMasqueradeCIDRs).Prefixes()
	if _, some := uncovered(everything(f.IPv6), exempt); !some {
		return ""
	}
	rest := "Any other " + familyName(f.IPv6) + " destination sees the node's address"
	if len(f.SNAT.CIDRs) > 0 {
		rest += ", or for connections of pods one of " + config.KeySNATAddresses + " that the node has"
	}
	linkLocal, masq, key := linkLocalIPv4, c.MasqLinkLocal, "masqLinkLocal"
	if f.IPv6 {
		linkLocal, masq, key = linkLocalIPv6, c.MasqLinkLocalIPv6, "masqLinkLocalIPv6"
	}
	if masq && !overlapsAny(linkLocal, exempt) {
		rest += fmt.Sprintf(",\nlink-local %s too (%s is true)", linkLocal, key)
	}
	return rest + "."
}

func sourcePorts(p nft.Policy) string {
	how := either(p.RandomFully, "fully random", "kept if free")
	if len(p.Ports) > 0 {
		how += "; tcp, udp, sctp: " + portRanges(p.Ports)
		if slices.ContainsFunc(p.Ports, func(r config.PortRange) bool { return r.Min <= 32767 && r.Max >= 30000 }) {
			how += ", with the default NodePorts (30000-32767)"
		}
	}
	b := p.PortBlocks(false)
	if b.Count() == 0 {
		b = p.PortBlocks(true)
	}
	if b.Count() > 0 {
		how += fmt.Sprintf("; pods: %d blocks of %d from %d on, this node: %s", b.Count(), b.Size, b.Block(0).Min,
			portRanges(b.Node))
	}
	return how
}

// Print writes the report on an accepted config as text. It writes through, because there can be
// hundreds of thousands of CIDRs.
func (r *Check) Print(to *bufio.Writer) {
	line := func(format string, args ...any) { _, _ = fmt.Fprintf(to, format+"\n", args...) }
	m := r.Meaning
	line("%s\n", r.verdict())
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	where := either(r.Config.Chain == "", "table inet "+nft.TableName, "chain "+r.Config.Chain)
	_, _ = fmt.Fprintf(w, "config\t%s\nmode\t%s: %s\nIPv6\t%s\nsource ports\t%s\nresync\tevery %s\n", r.Config.Hash,
		r.Config.Mode, where, either(m.EnableIPv6, "on", "off: IPv6 is not masqueraded"), m.sourcePorts, m.resync)
	_ = w.Flush()
	for i, t := range m.Translation {
		if i == 0 || t.Key != m.Translation[i-1].Key {
			line("\n%s: %s", t.Key, t.means)
		}
		line("  %-17s %s", t.Value, t.Place)
	}
	for _, f := range m.Families {
		for _, l := range f.Lists {
			line("\n%s %s: %s", f.name, l.Key, l.means)
			if l.Place != nowhere {
				line("  %-18s%s", "false", l.Place)
			}
			for _, i := range l.Interfaces {
				line("  %-18s%s", i.Name, i.Place)
			}
			// A tabwriter would buffer tens of thousands of lines.
			width := 18
			for _, c := range l.CIDRs {
				width = max(width, len(c.CIDR)+2)
			}
			for _, c := range l.CIDRs {
				line("  %-*s%s", width, c.CIDR, c.place(c.CIDR))
			}
		}
		if f.rest != "" {
			line("\n%s", f.rest)
		}
	}
	var b strings.Builder
	list(&b, "Warnings:", texts(r.Warnings))
	list(&b, "Notes:", texts(r.Notes))
	_, _ = to.WriteString(b.String())
}

// verdict lists the valid files, or reports that the defaults apply.
func (r *Check) verdict() string {
	switch files := r.Config.Files; len(files) {
	case 0:
		return "no config at " + r.Config.Path + ": the built-in defaults apply"
	case 1:
		return files[0] + " is valid"
	default:
		return fmt.Sprintf("the %d files in %s are valid, merged in this order:\n  %s", len(files), r.Config.Path,
			strings.Join(files, "\n  "))
	}
}
