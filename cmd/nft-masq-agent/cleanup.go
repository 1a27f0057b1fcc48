package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os/signal"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/xtables"
)

type cleanupFlags struct {
	*cli.Options
	legacy, legacyOnly, dryRun, wait bool
	output                           string
}

func cleanupCommand() command {
	return command{
		name:  "cleanup",
		about: "remove from the kernel what any mode of the agent installed",
		details: "It removes the rules of both modes, whichever flags the agent had. Stop the agent first: a running agent " +
			"would restore its rules, so cleanup refuses next to one, except with --legacy-only or --dry-run. Existing " +
			"connections keep their address.",
		examples: []string{program + " cleanup", program + " cleanup --legacy-only --dry-run"},
		flags: func(fs *flag.FlagSet) action {
			f := &cleanupFlags{Options: cli.AddNodeFlags(fs)} // only its socket makes a difference
			addOutput(fs, &f.output)
			fs.BoolVar(&f.legacy, "legacy", false, "also remove the chains of iptables-based agents, with their jumps")
			fs.BoolVar(&f.legacyOnly, "legacy-only", false, "remove only those chains, also next to a running agent")
			fs.BoolVar(&f.dryRun, "dry-run", false, "print what would be removed, and remove nothing")
			fs.BoolVar(&f.wait, "wait", false, "when everything is removed, wait for SIGTERM: for use in a DaemonSet")
			return f.cleanup
		},
	}
}

// A cleanupAnswer is the output of cleanup.
type cleanupAnswer struct {
	cli.Head
	// DryRun means that nothing was removed.
	DryRun bool `json:"dryRun"`
	// Removed are the tables, chains and rules that were removed, or would be.
	Removed []string `json:"removed"`
}

// Print writes the answer as text.
func (c *cleanupAnswer) Print(t cli.Text) {
	if len(c.Removed) == 0 {
		t.Line("nothing to remove")
	}
	word := "removed"
	if c.DryRun {
		word = "would remove"
	}
	for _, line := range c.Removed {
		t.Line("%s %s", word, line)
	}
}

func (f *cleanupFlags) removal() kernel.Removal {
	switch {
	case f.legacyOnly:
		return kernel.OlderOnly
	case f.legacy:
		return kernel.WithOlder
	}
	return kernel.Ours
}

func (f *cleanupFlags) cleanup(ctx context.Context, _ []string, e environment) (int, error) {
	if f.legacy && f.legacyOnly {
		return exitUsage, usagef("--legacy removes this agent's rules, too, and --legacy-only does not: omit one")
	}
	pid, found := running.Agent()
	report, err := running.Ask(cmp.Or(f.ProbeSocket, e.socket))
	if err == nil {
		pid = report.PID
	}
	found = found || err == nil || errors.Is(err, running.ErrNoAnswer)
	if found && !f.legacyOnly && !f.dryRun {
		return exitFailed, fmt.Errorf("an agent runs here (%s) and would restore its rules: stop it first",
			running.Process(pid))
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	var kept config.Problems
	remove := e.kernel.Cleanup
	if f.dryRun {
		remove = e.kernel.Removable
	}
	removed, err := remove(ctx, f.removal())
	if err != nil {
		return exitFailed, hinted(err)
	}
	if f.legacy || f.legacyOnly {
		chains, err := e.kernel.Doubtful(ctx)
		if err != nil {
			return exitFailed, hinted(err)
		}
		for _, c := range chains {
			kept = append(kept, cli.Problem(config.Warning, "older-agent", "%s", c))
		}
		tables, err := xtables.OlderTables(e.proc + "/thread-self/net")
		if err != nil { // what was removed is said all the same
			kept = append(kept, cli.Problem(config.Warning, "older-agent", "%v", err))
		}
		for _, t := range tables { // netlink cannot remove their rules: they are no part of nf_tables
			kept = append(kept, cli.Problem(config.Warning, "older-agent", "legacy ip_tables (table %s) has rules of an "+
				"iptables-based agent, which this program does not remove: %s", t, t.Command()))
		}
	}
	r := cleanupAnswer{cli.NewHead(e.command), f.dryRun, append([]string{}, removed...)}
	if code, err := e.reply(f.output, &r, kept...); err != nil {
		return code, err
	}
	if f.wait && !f.dryRun {
		<-ctx.Done()
	}
	return exitDone, nil
}

// hinted puts the cause and what to do before the words of netlink.
func hinted(err error) error {
	if hint := kernel.Hint(err); hint != "" {
		return fmt.Errorf("%s (%w)", hint, err)
	}
	return err
}
