package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
)

func manCommand() command {
	return command{
		name: "man", about: "print the manual page, for man -l -",
		details:  "It has the texts of --help. The format is that of groff's macros man.",
		examples: []string{program + " man | man -l -"},
		flags: func(*flag.FlagSet) action {
			return func(_ context.Context, _ []string, e environment) (int, error) {
				return exitDone, write(e.stdout, manual(commands()))
			}
		},
	}
}

// manual returns the manual page of the program, as roff.
func manual(all []command) string {
	var b strings.Builder
	escape := strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, `"`, `\(dq`, ".", `\&.`).Replace
	paragraph := func(macro, text string) { b.WriteString("." + macro + "\n" + escape(text) + "\n") }
	section := func(macro, title string) { fmt.Fprintf(&b, ".%s \"%s\"\n", macro, escape(title)) }
	flags := func(text string) {
		for line := range strings.Lines(text) {
			if name := strings.TrimSpace(line); strings.HasPrefix(line, "  -") {
				b.WriteString(".TP\n\\fB" + escape(name) + "\\fR\n")
			} else {
				b.WriteString(escape(name) + "\n")
			}
		}
	}
	fmt.Fprintf(&b, ".TH %s 8\n.SH NAME\n%s \\- %s\n", strings.ToUpper(escape(program)), escape(program), escape(purpose))
	section("SH", "SYNOPSIS")
	paragraph("B", program+" [COMMAND] [FLAGS]")
	paragraph("P", "run is the default command. "+exitCodes)
	section("SH", "COMMANDS")
	shared := ""
	for _, c := range all {
		fs, _ := c.flagSet()
		own, common := flagHelp(fs)
		if len(common) > len(shared) {
			shared = common
		}
		section("SS", strings.TrimSpace(c.name+" "+c.operands))
		paragraph("P", strings.ToUpper(c.about[:1])+c.about[1:]+". "+c.details)
		flags(own)
		paragraph("P\nFor example:\n.EX", strings.Join(c.examples, "\n")+"\n")
		b.WriteString(".EE\n")
	}
	section("SH", "FLAGS OF ALL COMMANDS THAT READ THE CONFIG")
	flags(shared)
	return b.String()
}
