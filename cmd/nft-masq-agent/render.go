package main

import (
	"context"
	"errors"
	"flag"
	"fmt"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/nft"
)

// Formats of render.
const (
	formatNFT       = "nft"
	formatIPTables  = "iptables"
	formatWinBridge = "win-bridge"
)

type renderFlags struct {
	*options.Options
	format     string
	windowsAPI int // 0 if not given
}

func renderCommand() command {
	return command{
		name:  "render",
		about: "print what run would install",
		details: "nft is for nft -f, which replaces the whole table; unlike the agent, it does not guarantee that every packet " +
			"gets the right verdict meanwhile. iptables is for iptables-restore --noflush. win-bridge is the policy " +
			"for Windows nodes of the same cluster, an entry of the list policies of a win-bridge configuration. " +
			"Nothing is written to the kernel.",
		examples: []string{
			program + " render --config ./ip-masq-agent | nft -c -f -",
			program + " render --config ./ip-masq-agent -o win-bridge --windows-api 2",
		},
		flags: func(fs *flag.FlagSet) action {
			f := &renderFlags{Options: options.AddPolicyFlags(fs)}
			for name, usage := range map[string]string{
				"output": "nft, iptables or win-bridge `FORMAT` (default nft, in mode iptables-nft iptables)",
				"o":      "short for --output=`FORMAT`", "format": "older name of --output=`FORMAT`",
			} {
				options.AddFlag(fs, &f.format, name, "", usage, options.OneOf(formatNFT, formatIPTables, formatWinBridge))
			}
			options.AddFlag(fs, &f.windowsAPI, "windows-api", "",
				"API `VERSION` of win-bridge, as in apiVersion of its configuration: 1 is HNS, 2 is HCN", parseWindowsAPI)
			return f.render
		},
	}
}

func (f *renderFlags) render(_ context.Context, _ []string, e environment) (int, error) {
	f.ForCommand(e.stdin)
	if err := f.settle(); err != nil {
		return exitUsage, err
	}
	l, err := f.Load()
	if err != nil {
		return exitFailed, l.Why(err)
	}
	for _, p := range l.Problems {
		printProblem(e, p)
	}
	if l.Ruleset, err = e.onThisNode(l.Ruleset); err != nil {
		return exitFailed, err
	}
	if f.format != formatWinBridge {
		for _, line := range answer.NodeSNAT(l.Ruleset.Policy) {
			_, _ = fmt.Fprintln(e.stderr, line)
		}
	}
	text := l.Ruleset.String()
	if f.format == formatWinBridge {
		var leftOut int
		if text, leftOut, err = answer.WinBridge(f.windowsAPI, l.Config, l.Ruleset.Policy); leftOut > 0 {
			_, _ = fmt.Fprintf(e.stderr, "omitted: %s, because the policy is for IPv4\n", answer.Plural(leftOut, "IPv6 CIDR"))
		}
	}
	if err != nil {
		return exitFailed, err
	}
	return exitDone, write(e.stdout, text)
}

// settle checks and completes flags that depend on one another.
func (f *renderFlags) settle() error {
	if f.format == "" {
		f.format = formatNFT
		if f.Mode == nft.ModeIPTables {
			f.format = formatIPTables
		}
	}
	switch {
	case f.format != formatWinBridge && f.windowsAPI != 0:
		return usagef("--windows-api is for --format win-bridge")
	case f.format == formatWinBridge && f.windowsAPI == 0:
		return usagef("--format win-bridge needs --windows-api 1 or --windows-api 2")
	case f.format == formatWinBridge && len(f.Ports) > 0:
		return usagef("--to-ports is not supported by win-bridge")
	}
	switch f.format {
	case formatNFT, formatWinBridge:
		f.Mode = nft.ModeNFTables
	case formatIPTables:
		f.Mode = nft.ModeIPTables
	}
	return nil
}

func parseWindowsAPI(s string) (int, error) {
	switch s {
	case "1":
		return answer.WindowsHNS, nil
	case "2":
		return answer.WindowsHCN, nil
	}
	return 0, errors.New("is neither 1 (HNS) nor 2 (HCN)")
}
