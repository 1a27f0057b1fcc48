package main

import (
	"context"
	"flag"
	"fmt"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
)

func helpCommand() command {
	return command{
		name: "help", operands: "[COMMAND]", about: "show the flags of a command, with examples",
		examples: []string{program + " help explain"},
		flags: func(*flag.FlagSet) action {
			return func(_ context.Context, operands []string, e environment) (int, error) {
				if len(operands) == 0 {
					return exitDone, write(e.stdout, programHelp(commands()))
				}
				c, err := find(commands(), operands[0])
				if err != nil {
					return exitUsage, usageError{err}
				}
				return exitDone, write(e.stdout, c.help())
			}
		},
	}
}

// Texts of the help.
const (
	purpose = "controls which pod traffic a Kubernetes node masquerades behind its own address, and which traffic " +
		"keeps the pod's IP"
	exitCodes = "Exit codes: 0 done, valid, in sync; 1 failed, invalid, out of sync, or something needs attention; " +
		"2 wrong usage, or with diff any error."
	sharedFlags = "--config PATH, --mode and the other flags of all commands that read the config: see " + program +
		" help run."
	klogFlags = "All other klog flags are accepted and ignored, so that the command lines of older agents keep working."
)

func programHelp(all []command) string {
	var b strings.Builder
	b.WriteString(cli.Line(program+" "+purpose+". It takes the config file and the flags of ip-masq-agent.", "") + "\n")
	fmt.Fprintf(&b, "Usage: %s [COMMAND] [FLAGS]\n\n", program)
	for _, c := range all {
		b.WriteString(listed(c.name, c.about))
	}
	b.WriteString("\n" + cli.Line("run is the default command.", ""))
	b.WriteString(cli.Line(exitCodes, ""))
	return cli.Fit(b.String())
}

func listed(name, about string) string {
	const indent = 15
	lines := cli.Fit(strings.Repeat(" ", indent) + about + "\n")
	return fmt.Sprintf("  %-*s", indent-2, name) + lines[indent:]
}

func (c command) help() string {
	var b strings.Builder
	usage := program + " " + c.name
	if c.operands != "" {
		usage += " " + c.operands
	}
	fmt.Fprintf(&b, "Usage: %s [FLAGS]\n\n", usage)
	b.WriteString(cli.Line(strings.ToUpper(c.about[:1])+c.about[1:]+".", ""))
	if c.details != "" {
		b.WriteString("\n" + cli.Line(c.details, ""))
	}
	text := cli.Fit(b.String())
	b.Reset()
	b.WriteString("\nFor example:\n")
	for _, x := range c.examples {
		fmt.Fprintf(&b, "  %s\n", x)
	}
	fs, _ := c.flagSet()
	own, shared := flagHelp(fs)
	if own != "" {
		b.WriteString("\nFlags:\n" + cli.Fit(own))
	}
	switch {
	case c.name == "run":
		b.WriteString("\nFlags of all commands that read the config:\n" + cli.Fit(shared))
		b.WriteString(cli.Fit(cli.Line(klogFlags, "  ")))
	case shared != "":
		b.WriteString("\n" + cli.Fit(cli.Line(sharedFlags, "")))
	}
	return text + b.String()
}

// flagHelp lists the flags of the command alone, and those of all commands that read the
// config. It omits klog's, except -v where that has an effect.
func flagHelp(fs *flag.FlagSet) (own, shared string) {
	var alone, common strings.Builder
	policy := flag.NewFlagSet("", flag.ContinueOnError)
	cli.AddPolicyFlags(policy)
	hasLevels := fs.Lookup("probe-socket") != nil
	fs.VisitAll(func(f *flag.Flag) {
		switch {
		case f.Name == "o": // It is listed with --output.
		case f.Name == "v" && hasLevels:
			alone.WriteString(describeFlag(f))
		case cli.IsKlogFlag(f.Name):
		case policy.Lookup(f.Name) != nil:
			common.WriteString(describeFlag(f))
		default:
			alone.WriteString(describeFlag(f))
		}
	})
	return alone.String(), common.String()
}

// describeFlag returns a flag with its value, and its meaning on the next line.
func describeFlag(f *flag.Flag) string {
	name := "--" + f.Name
	switch {
	case f.Name == "output":
		name = "-o, --output"
	case len(f.Name) == 1:
		name = "-" + f.Name
	}
	value, usage := flag.UnquoteUsage(f)
	if f.DefValue != "" && f.DefValue != "false" {
		usage += fmt.Sprintf(" (default %s)", f.DefValue)
	}
	return strings.TrimRight("  "+name+" "+value, " ") + "\n" + cli.Line(usage, "        ")
}
