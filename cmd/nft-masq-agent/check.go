package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"text/tabwriter"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

type checkFlags struct {
	*options
	podCIDRs []netip.Prefix
	strict   bool
	output   string
}

func checkCommand() command {
	return command{
		name:  "check",
		about: "validates the config and prints what it means",
		details: "It names each CIDR with its place, what is dropped because another CIDR covers it, and what the config " +
			"probably does not mean to say. Each problem of a bad config is a line on stderr that begins with FILE:LINE:COL. " +
			"The kernel is neither read nor written.",
		examples: []string{
			program + " check --config ./ip-masq-agent",
			program + " check --config ./ip-masq-agent --pod-cidr 10.244.0.0/16 --strict",
		},
		flags: func(fs *flag.FlagSet) action {
			f := checkFlags{options: addPolicyFlags(fs)}
			fs.BoolVar(&f.strict, "strict", false, "warnings are errors: exit code 1")
			fs.Func("pod-cidr", "warn where pods of this `CIDR` would see a node's address instead of a pod's; "+
				"can be given several times, or as a list with commas", f.addPodCIDRs)
			addFlag(fs, &f.output, "o", outputText, "text or json `FORMAT` of the answer", oneOf(outputText, outputJSON))
			return func(_ context.Context, _ []string, e environment) (int, error) { return f.check(e) }
		},
	}
}

func (f *checkFlags) addPodCIDRs(list string) error {
	for _, s := range strings.Split(list, ",") {
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil:
			return fmt.Errorf("%q is no CIDR, such as 10.244.0.0/16", s)
		case p != p.Masked():
			return fmt.Errorf("%q has host bits set, the network is %s", s, p.Masked())
		case p.Addr().Is4In6():
			return fmt.Errorf("%q is an IPv4-mapped CIDR", s)
		}
		f.podCIDRs = append(f.podCIDRs, p)
	}
	return nil
}

func (f *checkFlags) check(e environment) (int, error) {
	l, err := f.load()
	if err != nil && f.output == outputJSON {
		return exitFailed, writeJSON(e.stdout, f.rejected(l, err))
	} else if err != nil {
		l.warn(e)
		return refuse(e, err)
	}
	found := append(fileFindings(l.warnings), lint(l.ruleset.Policy, f.podCIDRs)...)
	text := f.meaning(l, found)
	if f.output == outputJSON {
		if text, err = encodeJSON(f.report(l, found)); err != nil {
			return exitFailed, err
		}
	}
	if err := write(e.stdout, text); err != nil {
		return exitFailed, err
	}
	if n := len(warningsOf(found)); f.strict && n > 0 {
		return exitFailed, fmt.Errorf("%s, and --strict is given", counted(n, "warning"))
	}
	return exitDone, nil
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// fileFindings are the warnings of the parser.
func fileFindings(warnings []config.Problem) []finding {
	found := make([]finding, len(warnings))
	for i, w := range warnings {
		found[i] = finding{ID: "file", Pos: w.Pos, Msg: w.Msg}
	}
	return found
}

func warningsOf(found []finding) []finding { return only(found, false) }
func notesOf(found []finding) []finding    { return only(found, true) }

func only(found []finding, note bool) []finding {
	var out []finding
	for _, f := range found {
		if f.Note == note {
			out = append(out, f)
		}
	}
	return out
}

// meaning says in words what a valid config means.
func (f *checkFlags) meaning(l loaded, found []finding) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", l.verdict(f.configPath))
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, row := range f.summary(l) {
		_, _ = fmt.Fprintf(w, "%s\t%s\n", row[0], row[1])
	}
	_ = w.Flush() // a Builder takes everything
	for _, p := range l.ruleset.Policy.Families {
		writeFamily(&b, l.config, p)
	}
	writeFindings(&b, "Warnings:", warningsOf(found))
	writeFindings(&b, "Notes:", notesOf(found))
	return b.String()
}

// verdict says which files are valid, or that the defaults hold.
func (l loaded) verdict(path string) string {
	switch len(l.files) {
	case 0:
		return "no file at " + path + ": the defaults hold"
	case 1:
		return l.files[0] + " is valid"
	}
	return fmt.Sprintf("the %d files in %s are valid, joined in this order:\n  %s", len(l.files), path, strings.Join(l.files, "\n  "))
}

func (f *checkFlags) summary(l loaded) [][2]string {
	o := f.nftOptions()
	mode := string(o.Mode) + ": table inet " + nft.TableName
	if o.Mode == nft.ModeIPTables {
		mode = string(o.Mode) + ": chain " + o.Chain
	}
	ports := "kept where they are free"
	if o.RandomFully {
		ports = "fully random"
	}
	if len(o.Ports) > 0 {
		ports += "; tcp, udp, sctp: " + portList(o.Ports)
	}
	ipv6 := "off: nothing of IPv6 is masqueraded"
	if l.config.EnableIPv6 {
		ipv6 = "on"
	}
	return [][2]string{
		{"config", l.ruleset.Hash()},
		{"mode", mode},
		{"IPv6", ipv6},
		{"source ports", ports},
		{"resync", "every " + l.config.ResyncInterval.String()},
	}
}

func portList(ports []nft.PortRange) string {
	words := make([]string, len(ports))
	for i, r := range ports {
		words[i] = r.String()
	}
	return strings.Join(words, ",")
}

// writeFamily lists the CIDRs of a family in the order in which they are asked.
func writeFamily(b *strings.Builder, c config.Config, f nft.FamilyPolicy) {
	for _, l := range keyedLists(f) {
		if len(l.CIDRs) == 0 {
			continue
		}
		fmt.Fprintf(b, "\n%s %s: %s\n", familyName(f.IPv6), l.key, l.means)
		w := tabwriter.NewWriter(b, 20, 0, 2, ' ', 0)
		for _, c := range l.CIDRs {
			_, _ = fmt.Fprintf(w, "  %s\t%s\n", c.Prefix, place(c))
		}
		_ = w.Flush()
		for _, c := range l.Covered {
			fmt.Fprintf(b, "  dropped: %s (%s),\n    covered by %s (%s)\n", c.Prefix, place(c.CIDR), c.By.Prefix, place(c.By))
		}
	}
	if _, some := uncovered(everything(f.IPv6), f.NonMasq.CIDRs); !some {
		return
	}
	rest := "\nAny other " + familyName(f.IPv6) + " destination sees the node's address"
	linkLocal, masq, key := linkLocalIPv4, c.MasqLinkLocal, "masqLinkLocal"
	if f.IPv6 {
		linkLocal, masq, key = linkLocalIPv6, c.MasqLinkLocalIPv6, "masqLinkLocalIPv6"
	}
	if masq && !overlapsAny(linkLocal, f.NonMasq.Prefixes()) {
		rest += fmt.Sprintf(",\nlink-local %s too (%s is true)", linkLocal, key)
	}
	b.WriteString(rest + ".\n")
}

func writeFindings(b *strings.Builder, title string, found []finding) {
	if len(found) == 0 {
		return
	}
	fmt.Fprintf(b, "\n%s\n", title)
	for _, f := range found {
		if f.Pos == (config.Position{}) {
			b.WriteString(wrap(f.Msg, "  "))
			continue
		}
		fmt.Fprintf(b, "  %s: %s\n", f.Pos, f.Msg) // one line, for editors
	}
}
