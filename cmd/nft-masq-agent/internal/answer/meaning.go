package answer

import (
	"bufio"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Meaning describes what a valid config means. It writes through, because there
// can be hundreds of thousands of CIDRs.
func Meaning(to *bufio.Writer, o options.Options, l Loaded, found config.Problems) {
	printf(to, "%s\n\n", verdict(l, o.ConfigPath))
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, row := range summary(o.NFT(), l) {
		_, _ = fmt.Fprintf(w, "%s\t%s\n", row[0], row[1])
	}
	_ = w.Flush()
	for _, t := range config.Translations() {
		for i, given := range t.Values(l.Config) {
			if i == 0 {
				printf(to, "\n%s: %s\n", t.Key, t.Means)
			}
			printf(to, "  %-17s %s\n", given.Text, given.Pos)
		}
	}
	for _, p := range l.Ruleset.Policy.Families {
		writeFamily(to, l.Config, p)
	}
	var b strings.Builder
	list(&b, "Warnings:", texts(found.Of(config.Warning)))
	list(&b, "Notes:", texts(found.Of(config.Note)))
	_, _ = to.WriteString(b.String())
}

// printf is fmt.Fprintf. The writer keeps an error until it is flushed.
func printf(w *bufio.Writer, format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }

// verdict lists the valid files, or reports that the defaults apply.
func verdict(l Loaded, path string) string {
	switch len(l.Files) {
	case 0:
		return "no file at " + path + ": the built-in defaults apply"
	case 1:
		return l.Files[0] + " is valid"
	}
	return fmt.Sprintf("the %d files in %s are valid, merged in this order:\n  %s", len(l.Files), path,
		strings.Join(l.Files, "\n  "))
}

func summary(o nft.Options, l Loaded) [][2]string {
	mode := string(o.Layout.Mode()) + ": table inet " + nft.TableName
	if chain := o.Layout.Chain(); chain != "" {
		mode = string(o.Layout.Mode()) + ": chain " + chain
	}
	return [][2]string{
		{"config", l.Ruleset.Hash()},
		{"mode", mode},
		{"IPv6", either(l.Config.EnableIPv6, "on", "off: IPv6 is not masqueraded")},
		{"source ports", sourcePorts(l.Ruleset.Policy)},
		{"resync", "every " + l.Config.ResyncInterval.String()},
	}
}

func sourcePorts(p nft.Policy) string {
	how := either(p.RandomFully, "fully random", "kept if free")
	if len(p.Ports) > 0 {
		how += "; tcp, udp, sctp: " + strings.Join(texts(p.Ports), ",")
		if slices.ContainsFunc(p.Ports, func(r config.PortRange) bool { return r.Min <= 32767 && r.Max >= 30000 }) {
			how += ", with the default NodePorts (30000-32767)"
		}
	}
	if b := nft.NewPortBlocks(p.PortsPerPod, p.Ports); b.Count() > 0 {
		how += fmt.Sprintf("; pods: %d blocks of %d from %d on, this node: %s", b.Count(), b.Size, b.Block(0).Min,
			strings.Join(texts(b.Node), ","))
	}
	return how
}

// writeFamily lists the CIDRs of a family in evaluation order.
func writeFamily(w *bufio.Writer, c config.Config, f nft.FamilyPolicy) {
	for _, q := range f.Questions {
		printf(w, "\n%s %s: %s\n", familyName(f.IPv6), q.Key, q.Means)
		if q.Asks == config.SentByNode {
			printf(w, "  %-18s%s\n", "false", q.At)
		}
		for _, i := range q.Interfaces {
			printf(w, "  %-18s%s\n", i.Name, i.Pos)
		}
		// A tabwriter would buffer tens of thousands of lines.
		width := 18
		for _, c := range q.CIDRs {
			width = max(width, len(c.String())+2)
		}
		for _, c := range q.CIDRs {
			printf(w, "  %-*s%s\n", width, c.Prefix, place(c))
		}
	}
	if _, some := uncovered(everything(f.IPv6), f.List(config.KeyNonMasqueradeCIDRs).Prefixes()); !some {
		return
	}
	rest := "\nAny other " + familyName(f.IPv6) + " destination sees the node's address"
	if len(f.SNAT.CIDRs) > 0 {
		rest += ", or for connections of pods one of " + config.KeySNATAddresses + " that the node has"
	}
	linkLocal, masq, key := linkLocalIPv4, c.MasqLinkLocal, "masqLinkLocal"
	if f.IPv6 {
		linkLocal, masq, key = linkLocalIPv6, c.MasqLinkLocalIPv6, "masqLinkLocalIPv6"
	}
	if masq && !overlapsAny(linkLocal, f.List(config.KeyNonMasqueradeCIDRs).Prefixes()) {
		rest += fmt.Sprintf(",\nlink-local %s too (%s is true)", linkLocal, key)
	}
	_, _ = w.WriteString(rest + ".\n")
}
