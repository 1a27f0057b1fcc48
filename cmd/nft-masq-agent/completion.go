package main

import (
	"context"
	"flag"
	"fmt"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
)

func completionCommand() command {
	return command{
		name: "completion", operands: "SHELL", about: "print a completion script for bash, zsh or fish",
		details: "It completes commands, their flags, and files. The script is that of this version of the program.",
		examples: []string{
			program + " completion fish > ~/.config/fish/completions/" + program + ".fish",
			"source <(" + program + " completion bash)",
		},
		flags: func(*flag.FlagSet) action {
			return func(_ context.Context, operands []string, e environment) (int, error) {
				switch operands[0] {
				case "bash":
					return exitDone, write(e.stdout, bashCompletion(commands()))
				case "zsh":
					return exitDone, write(e.stdout, "autoload -U +X bashcompinit && bashcompinit\n"+bashCompletion(commands()))
				case "fish":
					return exitDone, write(e.stdout, fishCompletion(commands()))
				}
				return exitUsage, usagef("SHELL %q must be bash, zsh or fish", operands[0])
			}
		},
	}
}

func flagsOf(c command, visit func(f *flag.Flag)) {
	fs, _ := c.flagSet()
	fs.VisitAll(func(f *flag.Flag) {
		if len(f.Name) > 1 && !options.IsKlogFlag(f.Name) {
			visit(f)
		}
	})
}

func bashCompletion(all []command) string {
	var names, cases strings.Builder
	for _, c := range all {
		names.WriteString(" " + c.name)
		fmt.Fprintf(&cases, "  %s) words='", c.name)
		flagsOf(c, func(f *flag.Flag) { cases.WriteString("--" + f.Name + " ") })
		cases.WriteString("--help' ;;\n")
	}
	return fmt.Sprintf(`_nft_masq_agent() {
  local current="${COMP_WORDS[COMP_CWORD]}" words=''
  case "${COMP_WORDS[1]}" in
%s  esac
  if [ "$COMP_CWORD" = 1 ]; then words='%s'; fi
  if [ "$COMP_CWORD" = 1 ] || [ "${current#-}" != "$current" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}
complete -o filenames -F _nft_masq_agent %s
`, cases.String(), strings.TrimSpace(names.String()), program)
}

func fishCompletion(all []command) string {
	var b strings.Builder
	quoted := func(s string) string { return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(s) + "'" }
	for _, c := range all {
		fmt.Fprintf(&b, "complete -c %s -n __fish_use_subcommand -a %s -d %s\n", program, c.name, quoted(c.about))
		flagsOf(c, func(f *flag.Flag) {
			_, usage := flag.UnquoteUsage(f)
			fmt.Fprintf(&b, "complete -c %s -n '__fish_seen_subcommand_from %s' -l %s -d %s\n", program, c.name, f.Name,
				quoted(usage))
		})
	}
	return b.String()
}
