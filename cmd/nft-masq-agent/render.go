package main

import (
	"cmp"
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

func renderCommand() command {
	return command{
		name: "render", operands: "[FILE]",
		about: "print what run would install",
		details: "Format nft is for nft -f, which replaces the whole table; unlike the agent, it does not guarantee the " +
			"right verdict for every packet meanwhile. Format iptables is for iptables-restore --noflush. The default is " +
			"that of the mode. Format win-bridge is for Windows nodes of the same cluster: an entry of policies in a " +
			"win-bridge configuration with apiVersion 2. Flags that are not given are those of the running agent. Nothing is " +
			"written to the kernel.",
		examples: []string{
			program + " render ./ip-masq-agent | nft -c -f -",
			program + " render ./ip-masq-agent -o win-bridge",
		},
		flags: func(fs *flag.FlagSet) action {
			f := &nodeFlags{Options: cli.AddNodeFlags(fs)}
			f.AddManifest(fs)
			addFormats(fs, &f.output, "", formatNFT, formatIPTables, formatWinBridge)
			return f.render
		},
	}
}

func (f *nodeFlags) render(_ context.Context, operands []string, e environment) (int, error) {
	if err := f.UseFile(operands); err != nil {
		return exitUsage, usageError{err}
	}
	s := f.ask(e)
	if s.whose != "" {
		_, _ = fmt.Fprintln(e.stderr, s.whose)
	}
	switch f.output {
	case formatNFT, formatWinBridge:
		f.Mode = nft.ModeNFTables
	case formatIPTables:
		f.Mode = nft.ModeIPTables
	}
	err := s.load()
	if errors.Is(s.rejected, config.ErrMissing) {
		return exitUsage, s.rejected
	}
	if s.rejected != nil || err != nil {
		return exitFailed, cmp.Or(s.rejected, err)
	}
	e.printProblems(s.Problems)
	if f.output != formatWinBridge {
		return exitDone, write(e.stdout, s.Ruleset.String())
	}
	text, omitted, err := answer.WinBridge(s.Config, s.Ruleset.Policy)
	if err != nil {
		return exitFailed, err
	}
	if omitted > 0 {
		_, _ = fmt.Fprintf(e.stderr, "omitted: %s, because the policy is for IPv4\n", answer.Plural(omitted, "IPv6 CIDR"))
	}
	return exitDone, write(e.stdout, text)
}
