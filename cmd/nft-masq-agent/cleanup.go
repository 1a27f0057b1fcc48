package main

import (
	"context"
	"flag"
	"fmt"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/options"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
)

// cleanupWait is how long a running agent, or an older one, is given to put
// back what was removed.
const cleanupWait = time.Second

type cleanupFlags struct {
	legacy, wait bool
}

func cleanupCommand() command {
	return command{
		name:  "cleanup",
		about: "remove from the kernel what any mode of the agent installed",
		details: "Stop the agent first: a running agent restores its rules. cleanup checks for this after one second and reports " +
			"it. Existing connections keep their address.",
		examples: []string{program + " cleanup", program + " cleanup --legacy"},
		flags: func(fs *flag.FlagSet) action {
			options.AddPolicyFlags(fs)
			var f cleanupFlags
			fs.BoolVar(&f.legacy, "legacy", false, "also remove the chains of iptables-based agents, with their jumps")
			fs.BoolVar(&f.wait, "wait", false, "when everything is removed, wait for SIGTERM: for use in a DaemonSet")
			return func(ctx context.Context, _ []string, e environment) (int, error) { return f.cleanup(ctx, e) }
		},
	}
}

func (f cleanupFlags) cleanup(ctx context.Context, e environment) (int, error) {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	k := kernel.Open()
	defer func() { _ = k.Close() }()
	if only, err := k.OnlyNAT(); err == nil && only && len(legacyIPTables(e.proc)) == 0 {
		_, _ = fmt.Fprintln(e.stderr, "warning: no other rules on this node do NAT, so the kernel stops translating: connections that are masqueraded now will end")
	}
	removed, err := k.Cleanup(f.legacy)
	if err != nil {
		return exitFailed, hinted(err)
	}
	text := "nothing to remove\n"
	if len(removed) > 0 {
		text = "removed " + strings.Join(removed, "\nremoved ") + "\n"
	}
	if err := write(e.stdout, text); err != nil {
		return exitFailed, err
	}
	if f.legacy {
		warnOfLegacyIPTables(e)
	}
	if len(removed) > 0 {
		if err := f.lookAgain(ctx, k); err != nil {
			return exitFailed, err
		}
	}
	if f.wait {
		<-ctx.Done()
	}
	return exitDone, nil
}

// lookAgain says whether a running agent has put the rules back.
func (f cleanupFlags) lookAgain(ctx context.Context, k *kernel.Kernel) error {
	select {
	case <-ctx.Done():
	case <-time.After(cleanupWait):
	}
	back, err := k.Installed(f.legacy)
	if err != nil {
		return hinted(err)
	}
	if len(back) > 0 {
		return fmt.Errorf("a running agent put back: %s; stop it first", strings.Join(back, ", "))
	}
	return nil
}

// warnOfLegacyIPTables says what netlink cannot remove: rules in the older
// ip_tables are not part of nf_tables.
func warnOfLegacyIPTables(e environment) {
	for _, line := range legacyIPTables(e.proc) {
		_, _ = fmt.Fprintln(e.stderr, "warning: "+line)
	}
}

// legacyIPTables names the chains of iptables-based agents in legacy ip_tables, and
// the commands that remove them.
func legacyIPTables(proc string) []string {
	chains, err := foreign.LegacyChains(proc + "/thread-self/net")
	if err != nil {
		return []string{err.Error()}
	}
	var lines []string
	for _, c := range chains {
		lines = append(lines, fmt.Sprintf("%s; remove it with: %s", c, strings.Join(c.Commands(), " && ")))
	}
	return lines
}

// hinted adds to an error of the kernel what it usually means.
func hinted(err error) error {
	if hint := kernel.Hint(err); hint != "" {
		return fmt.Errorf("%w (%s)", err, hint)
	}
	return err
}
