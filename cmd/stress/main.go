// Command stress opens new connections through a node, as fast as it can, while
// the agent on it updates its rules, is killed, replaced and switched to its
// other mode, and while other programs destroy its rules. The far end counts by
// source address. The same is done with update recipes that are known to be
// wrong, to prove that wrong packets would be detected. It exists because a gap of
// microseconds shows only among millions of connections.
//
// It needs root or user namespaces, and works in its own network namespaces. It
// exits with 0 if no connection was wrong, and some were with the known-bad
// recipes.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

func main() {
	if code, ran := netns.InUserNS(); ran {
		os.Exit(code)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer cancel()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// settings bound a run.
type settings struct {
	agent string        // path of the binary
	each  time.Duration // duration of a scenario, and of a bad recipe
	flows uint64        // minimum in total
	limit time.Duration // total duration
	only  *regexp.Regexp
}

func parse(args []string, stderr io.Writer) (settings, error) {
	var s settings
	fs := flag.NewFlagSet("stress", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&s.agent, "agent", "bin/nft-masq-agent", "`PATH` of the agent")
	fs.DurationVar(&s.each, "each", 15*time.Second, "time for each scenario and each bad recipe")
	fs.Uint64Var(&s.flows, "flows", 1_000_000,
		"least `NUMBER` of connections in total: the scenarios are repeated until then")
	fs.DurationVar(&s.limit, "limit", 20*time.Minute, "most time in total")
	only := fs.String("only", "", "run only what matches the `PATTERN`, and the control")
	if err := fs.Parse(args); err != nil {
		return settings{}, err
	}
	if fs.NArg() > 0 {
		return settings{}, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	var err error
	if s.only, err = regexp.Compile(*only); err != nil {
		return settings{}, fmt.Errorf("only: %w", err)
	}
	return s, nil
}

// Exit codes.
const (
	exitClean = 0
	exitWrong = 1
	exitUsage = 2
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	s, err := parse(args, stderr)
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "stress:", err)
		return exitUsage
	}
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	r := &report{out: stdout}
	if err := r.begin(time.Now()); err != nil {
		_, _ = fmt.Fprintln(stderr, "stress:", err)
		return exitWrong
	}
	r.scenarios(ctx, s)
	r.recipes(ctx, s)
	if !r.end(s) {
		return exitWrong
	}
	return exitClean
}
