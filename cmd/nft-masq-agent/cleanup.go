package main

import (
	"context"
	"flag"
	"fmt"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
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
			f := &cleanupFlags{nodeFlags: &nodeFlags{Options: options.AddNodeFlags(fs)}}
			fs.BoolVar(&f.legacy, "legacy", false, "also remove the chains of iptables-based agents, with their jumps")
			fs.BoolVar(&f.legacyOnly, "legacy-only", false, "remove only these, for example next to a running agent")
			fs.BoolVar(&f.dryRun, "dry-run", false, "print what would be removed, and remove nothing")
			fs.BoolVar(&f.wait, "wait", false, "when everything is removed, wait for SIGTERM: for use in a DaemonSet")
			return f.cleanup
		},
	}
}

// what returns what to remove.
func (f *cleanupFlags) what() kernel.Removal {
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
	pid, found := running.Holder()
	if s := f.ask(e); s.agent != nil {
		pid, found = s.agent.PID, true
	}
	if found && !f.legacyOnly && !f.dryRun {
		return exitFailed, fmt.Errorf("an agent runs here (pid %d) and would restore its rules: stop it first", pid)
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	k := e.kernel()
	defer func() { _ = k.Close() }()
	if only, err := k.OnlyNAT(ctx); err == nil && only && !f.legacyOnly && len(legacyIPTables(e.proc)) == 0 {
		_, _ = fmt.Fprintln(e.stderr,
			"warning: there are no other NAT rules on this node, so the kernel stops translating: masqueraded connections "+
				"will break")
	}
	remove, word := k.Cleanup, "removed "
	if f.dryRun {
		remove, word = k.Removable, "would remove "
	}
	removed, err := remove(ctx, f.what())
	if err != nil {
		return exitFailed, hinted(err)
	}
	text := "nothing to remove\n"
	if len(removed) > 0 {
		text = word + strings.Join(removed, "\n"+word) + "\n"
	}
	if err := write(e.stdout, text); err != nil {
		return exitFailed, err
	}
	if f.legacy || f.legacyOnly { // netlink cannot remove them: they are not part of nf_tables
		for _, line := range legacyIPTables(e.proc) {
			_, _ = fmt.Fprintln(e.stderr, "warning: "+line)
		}
	}
	if f.wait && !f.dryRun {
		<-ctx.Done()
	}
	return exitDone, nil
}

// legacyIPTables describes the tables of legacy ip_tables with rules of iptables-based
// agents.
func legacyIPTables(proc string) []string {
	tables, err := foreign.XTables(proc + "/thread-self/net")
	if err != nil {
		return []string{err.Error()}
	}
	var lines []string
	for _, t := range tables {
		lines = append(lines, fmt.Sprintf("%s has rules of an iptables-based agent, which this program does not remove: %s",
			t, t.Command()))
	}
	return lines
}

// hinted adds a hint to an error of the kernel.
func hinted(err error) error {
	if hint := kernel.Hint(err); hint != "" {
		return fmt.Errorf("%w (%s)", err, hint)
	}
	return err
}
