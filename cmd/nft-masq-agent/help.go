package main

import (
	"flag"
	"fmt"
	"slices"
	"strings"
)

// help answers the command of that name: about the program, or about one
// command.
func help(all []command, args []string, e environment) int {
	text := programHelp(all)
	switch {
	case len(args) > 1:
		_, _ = fmt.Fprintf(e.stderr, "%s help: unexpected argument %q\n", program, args[1])
		return exitUsage
	case len(args) == 1 && !slices.Contains([]string{"help", "-h", "-help", "--help"}, args[0]):
		c, err := find(all, args[0])
		if err != nil {
			_, _ = fmt.Fprintf(e.stderr, "%s help: %v\n", program, err)
			return exitUsage
		}
		text = c.help()
	}
	if err := write(e.stdout, text); err != nil {
		_, _ = fmt.Fprintf(e.stderr, "%s help: %v\n", program, err)
		return exitFailed
	}
	return exitDone
}

func programHelp(all []command) string {
	var b strings.Builder
	b.WriteString(wrap("nft-masq-agent decides on a node of Kubernetes which traffic leaves with the pod's own address and "+
		"which is masqueraded behind the node's. It takes the file and the flags of ip-masq-agent.", "") + "\n")
	fmt.Fprintf(&b, "Usage: %s [COMMAND] [FLAGS]\n\n", program)
	for _, c := range all {
		b.WriteString(listed(c.name, c.about))
	}
	b.WriteString(listed("help", "tells of a command: its flags, and an example") + "\n")
	b.WriteString(wrap("Without a command, or where a flag is the first argument, it is run.", ""))
	b.WriteString(wrap("Exit codes: 0 done, valid, in step; 1 failed, invalid, differs; 2 wrong usage.", ""))
	return b.String()
}

func listed(name, about string) string {
	const indent = 12
	return fmt.Sprintf("  %-*s", indent-2, name) + wrap(about, strings.Repeat(" ", indent))[indent:]
}

// help tells everything about one command.
func (c command) help() string {
	var b strings.Builder
	usage := program + " " + c.name
	if c.operands != "" {
		usage += " " + c.operands
	}
	fmt.Fprintf(&b, "Usage: %s [FLAGS]\n\n", usage)
	b.WriteString(wrap(c.name+" "+c.about+".", ""))
	if c.details != "" {
		b.WriteString("\n" + wrap(c.details, ""))
	}
	if len(c.examples) > 0 {
		b.WriteString("\nFor example:\n")
		for _, x := range c.examples {
			fmt.Fprintf(&b, "  %s\n", x)
		}
	}
	fs, _ := c.flagSet()
	if flags := flagHelp(fs); flags != "" {
		b.WriteString("\nFlags:\n" + flags)
	}
	return b.String()
}

// flagHelp lists the flags but for those of klog, which it sums up.
func flagHelp(fs *flag.FlagSet) string {
	var b strings.Builder
	klog := false
	fs.VisitAll(func(f *flag.Flag) {
		if isKlogFlag(f.Name) && (f.Name != "v" || fs.Name() != "run") {
			klog = true
			return
		}
		dashes := "--"
		if len(f.Name) == 1 {
			dashes = "-"
		}
		value, usage := flag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "false" {
			usage += fmt.Sprintf(" (default %s)", f.DefValue)
		}
		fmt.Fprintf(&b, "%s\n%s", strings.TrimRight("  "+dashes+f.Name+" "+value, " "), wrap(usage, "        "))
	})
	if klog {
		b.WriteString(wrap("Every other flag of klog is accepted and does nothing, so that the command lines of older agents go on working.", "  "))
	}
	return b.String()
}

// wrap breaks a text into lines of at most 80 columns, each behind an indent.
func wrap(text, indent string) string {
	var b strings.Builder
	column := 0
	for _, word := range strings.Fields(text) {
		if column > 0 && column+1+len(word) > 80 {
			b.WriteString("\n")
			column = 0
		}
		if column == 0 {
			b.WriteString(indent + word)
			column = len(indent) + len(word)
			continue
		}
		b.WriteString(" " + word)
		column += 1 + len(word)
	}
	b.WriteString("\n")
	return b.String()
}
