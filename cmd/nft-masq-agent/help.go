package main

import (
	"flag"
	"fmt"
	"slices"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/answer"
	"nft-masq-agent/cmd/nft-masq-agent/options"
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
	b.WriteString(answer.Wrap("nft-masq-agent decides on a node of Kubernetes which traffic leaves with the pod's own address and "+
		"which is masqueraded behind the node's. It takes the file and the flags of ip-masq-agent.", "") + "\n")
	fmt.Fprintf(&b, "Usage: %s [COMMAND] [FLAGS]\n\n", program)
	for _, c := range all {
		b.WriteString(listed(c.name, c.about))
	}
	b.WriteString(listed("help", "tells of a command: its flags, and an example") + "\n")
	b.WriteString(answer.Wrap("Without a command, or where a flag is the first argument, it is run.", ""))
	b.WriteString(answer.Wrap("Exit codes: 0 done, valid, in step; 1 failed, invalid, differs; 2 wrong usage.", ""))
	return b.String()
}

func listed(name, about string) string {
	const indent = 15
	return fmt.Sprintf("  %-*s", indent-2, name) + answer.Wrap(about, strings.Repeat(" ", indent))[indent:]
}

// help tells everything about one command.
func (c command) help() string {
	var b strings.Builder
	usage := program + " " + c.name
	if c.operands != "" {
		usage += " " + c.operands
	}
	fmt.Fprintf(&b, "Usage: %s [FLAGS]\n\n", usage)
	b.WriteString(answer.Wrap(c.name+" "+c.about+".", ""))
	if c.details != "" {
		b.WriteString("\n" + answer.Wrap(c.details, ""))
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
		if options.IsKlogFlag(f.Name) && (f.Name != "v" || fs.Name() != "run") {
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
		fmt.Fprintf(&b, "%s\n%s", strings.TrimRight("  "+dashes+f.Name+" "+value, " "), answer.Wrap(usage, "        "))
	})
	if klog {
		b.WriteString(answer.Wrap("Every other flag of klog is accepted and does nothing, so that the command lines of older agents go on working.", "  "))
	}
	return b.String()
}
