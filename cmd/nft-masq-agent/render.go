package main

import (
	"context"
	"errors"
	"flag"
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Formats of render.
const (
	formatNFT       = "nft"
	formatIPTables  = "iptables"
	formatWinBridge = "win-bridge"
)

type renderFlags struct {
	*nodeFlags
	format string
}

func renderCommand() command {
	return command{
		name: "render", operands: "[FILE]",
		about: "print what run would install",
		details: "Format nft is for nft -f, which replaces the whole table; unlike the agent, it does not guarantee the " +
			"right verdict for every packet meanwhile. Format iptables is for iptables-restore --noflush. Format win-bridge " +
			"is for Windows nodes of the same cluster: an entry of policies in a win-bridge configuration with apiVersion 2. " +
			"Flags that are not given are those of the running agent. Nothing is written to the kernel.",
		examples: []string{
			program + " render ./ip-masq-agent | nft -c -f -",
			program + " render ./ip-masq-agent -o win-bridge",
		},
		flags: func(fs *flag.FlagSet) action {
			f := &renderFlags{nodeFlags: &nodeFlags{Options: cli.AddNodeFlags(fs)}}
			f.AddManifest(fs)
			for name, usage := range map[string]string{
				"output": "nft, iptables or win-bridge `FORMAT` (default nft, in mode iptables-nft iptables)",
				"o":      "short for --output=`FORMAT`",
			} {
				cli.AddFlag(fs, &f.format, name, "", usage, cli.OneOf(formatNFT, formatIPTables, formatWinBridge))
			}
			return f.render
		},
	}
}

func (f *renderFlags) render(_ context.Context, operands []string, e environment) (int, error) {
	if err := f.UseFile(operands); err != nil {
		return exitUsage, usageError{err}
	}
	if whose := f.ask(e).whose; whose != "" {
		_, _ = fmt.Fprintln(e.stderr, whose)
	}
	switch f.format {
	case formatNFT, formatWinBridge:
		f.Mode = nft.ModeNFTables
	case formatIPTables:
		f.Mode = nft.ModeIPTables
	}
	l, err := answer.Load(*f.Options)
	if errors.Is(err, config.ErrMissing) {
		return exitUsage, err
	}
	if err != nil {
		return exitFailed, l.Explain(err)
	}
	for _, p := range l.Problems {
		printProblem(e, p)
	}
	l.Ruleset, err = e.onThisNode(l.Ruleset)
	if err != nil {
		return exitFailed, err
	}
	if f.format != formatWinBridge {
		for _, line := range answer.NodeSNAT(l.Ruleset.Policy) {
			_, _ = fmt.Fprintln(e.stderr, line)
		}
		return exitDone, write(e.stdout, l.Ruleset.String())
	}
	text, omitted, err := answer.WinBridge(l.Config, l.Ruleset.Policy)
	if err != nil {
		return exitFailed, err
	}
	if omitted > 0 {
		_, _ = fmt.Fprintf(e.stderr, "omitted: %s, because the policy is for IPv4\n", answer.Plural(omitted, "IPv6 CIDR"))
	}
	return exitDone, write(e.stdout, text)
}
