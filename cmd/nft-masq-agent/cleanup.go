package main

import (
	"context"
	"flag"
	"fmt"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/older"
)

type cleanupFlags struct {
	*nodeFlags
	legacy, legacyOnly, dryRun, wait bool
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
			f := &cleanupFlags{nodeFlags: addNodeFlags(fs)}
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

func (c *cleanupAnswer) String() string {
	word := "removed "
	switch {
	case len(c.Removed) == 0:
		return "nothing to remove\n"
	case c.DryRun:
		word = "would remove "
	}
	return word + strings.Join(c.Removed, "\n"+word) + "\n"
}

func (f *cleanupFlags) removal() kernel.Removal {
	switch {
	case f.legacyOnly:
		return kernel.LegacyOnly
	case f.legacy:
		return kernel.WithLegacy
	}
	return kernel.Ours
}

func (f *cleanupFlags) cleanup(ctx context.Context, _ []string, e environment) (int, error) {
	if f.legacy && f.legacyOnly {
		return exitUsage, usagef("--legacy removes this agent's rules, too, and --legacy-only does not: omit one")
	}
	s := f.ask(e)
	if a, found := s.runningAgent(); found && !f.legacyOnly && !f.dryRun {
		return exitFailed, fmt.Errorf("an agent runs here (%s) and would restore its rules: stop it first",
			running.Process(a.PID))
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	k := e.kernel()
	defer func() { _ = k.Close() }()
	var found config.Problems
	remove := k.Cleanup
	if f.dryRun {
		remove = k.Removable
	}
	removed, err := remove(ctx, f.removal())
	if err != nil {
		return exitFailed, hinted(err)
	}
	if f.legacy || f.legacyOnly {
		kept, err := k.Kept(ctx)
		if err != nil {
			return exitFailed, hinted(err)
		}
		for _, l := range kept {
			found = append(found, cli.Problem(config.Warning, "older-agent", "%s", l))
		}
		// netlink cannot remove these: they are not part of nf_tables
		for _, line := range legacyIPTables(e.proc) {
			found = append(found, cli.Problem(config.Warning, "older-agent", "%s", line))
		}
	}
	r := cleanupAnswer{cli.NewHead(e.command), f.dryRun, append([]string{}, removed...)}
	if code, err := e.reply(f.output, &r, found...); err != nil {
		return code, err
	}
	if f.wait && !f.dryRun {
		<-ctx.Done()
	}
	return exitDone, nil
}

// legacyIPTables describes the tables of legacy ip_tables with rules of iptables-based
// agents.
func legacyIPTables(proc string) []string {
	tables, err := older.XTables(proc + "/thread-self/net")
	if err != nil {
		return []string{err.Error()}
	}
	var lines []string
	for _, t := range tables {
		lines = append(lines, fmt.Sprintf("legacy ip_tables (table %s) has rules of an iptables-based agent, which this "+
			"program does not remove: %s", t, t.Command()))
	}
	return lines
}

// hinted puts the cause and what to do before the words of netlink.
func hinted(err error) error {
	if hint := kernel.Hint(err); hint != "" {
		return fmt.Errorf("%s (%w)", hint, err)
	}
	return err
}
