package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"time"

	"nft-masq-agent/nft"
)

// cleanupWait is how long a running agent, or an older one, is given to put
// back what was removed.
const cleanupWait = time.Second

func cleanupCommand() command {
	return command{
		name:  "cleanup",
		about: "removes from the kernel what any mode of the agent installed",
		details: "Stop the agent first: one that runs puts its rules back. Connections that are established keep the " +
			"address they have.",
		examples: []string{program + " cleanup"},
		flags: func(fs *flag.FlagSet) action {
			addPolicyFlags(fs)
			return func(ctx context.Context, _ []string, e environment) (int, error) {
				return cleanup(ctx, e)
			}
		},
	}
}

func cleanup(ctx context.Context, e environment) (int, error) {
	kernel := nft.Open()
	defer func() { _ = kernel.Close() }()
	removed, err := kernel.Cleanup()
	if err != nil {
		return exitFailed, hinted(err)
	}
	if len(removed) == 0 {
		return exitDone, write(e.stdout, "nothing to remove\n")
	}
	if err := write(e.stdout, "removed "+strings.Join(removed, ", ")+"\n"); err != nil {
		return exitFailed, err
	}
	select {
	case <-ctx.Done():
		return exitFailed, ctx.Err()
	case <-time.After(cleanupWait):
	}
	back, err := kernel.Installed()
	if err != nil {
		return exitFailed, hinted(err)
	}
	if len(back) > 0 {
		return exitFailed, fmt.Errorf("a running agent put back %s: stop it first", strings.Join(back, ", "))
	}
	return exitDone, nil
}

// hinted adds to an error of the kernel what it usually means.
func hinted(err error) error {
	if hint := nft.Hint(err); hint != "" {
		return fmt.Errorf("%w (%s)", err, hint)
	}
	return err
}
