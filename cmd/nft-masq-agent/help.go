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

func programHelp(known []command) string {
	var b strings.Builder
	b.WriteString(program + " " + purpose + ". It takes the config file and the flags of ip-masq-agent.\n\n")
	fmt.Fprintf(&b, "Usage: %s [COMMAND] [FLAGS]\n\n", program)
	for _, c := range known {
		fmt.Fprintf(&b, "  %-11s  %s\n", c.name, c.about)
	}
	b.WriteString("\nrun is the default command.\n" + exitCodes + "\n")
	return cli.Fit(b.String())
}

func (c command) help() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s\n\n", strings.Join(strings.Fields(program+" "+c.name+" "+c.operands+" [FLAGS]"), " "))
	b.WriteString(strings.ToUpper(c.about[:1]) + c.about[1:] + ".\n")
	if c.details != "" {
		b.WriteString("\n" + c.details + "\n")
	}
	b.WriteString("\nFor example:\n")
	for _, example := range c.examples {
		b.WriteString("  " + example + "\n")
	}
	own, shared := c.flagHelp()
	if own != "" {
		b.WriteString("\nFlags:\n" + own)
	}
	if c.name == "run" {
		b.WriteString("\nFlags of all commands that read the config:\n" + shared + "  " + klogFlags + "\n")
	} else if shared != "" {
		b.WriteString("\n" + sharedFlags + "\n")
	}
	return cli.Fit(b.String())
}

// flagHelp lists the flags of the command alone, and those of all commands that read the
// config. It omits klog's, except -v where that has an effect.
func (c command) flagHelp() (own, shared string) {
	policy := flag.NewFlagSet("", flag.ContinueOnError)
	cli.AddPolicyFlags(policy)
	fs, _ := c.flagSet()
	hasLevels := fs.Lookup("probe-socket") != nil
	fs.VisitAll(func(f *flag.Flag) {
		switch {
		case f.Name == "o", cli.IsKlogFlag(f.Name) && !(f.Name == "v" && hasLevels): // o is listed with --output
		case policy.Lookup(f.Name) != nil && f.Name != "v":
			shared += describeFlag(f)
		default:
			own += describeFlag(f)
		}
	})
	return own, shared
}

// describeFlag returns a flag with its value, and its meaning on the next line.
func describeFlag(f *flag.Flag) string {
	name := "--" + f.Name
	if f.Name == "output" {
		name = "-o, --output"
	}
	if len(f.Name) == 1 {
		name = "-" + f.Name
	}
	value, usage := flag.UnquoteUsage(f)
	if f.DefValue != "" && f.DefValue != "false" {
		usage += fmt.Sprintf(" (default %s)", f.DefValue)
	}
	return strings.TrimRight("  "+name+" "+value, " ") + "\n" + "        " + usage + "\n"
}
