// Command bench compares the agent with nft, iptables and the kernel itself, and
// prints one table. The contenders of a row run in turns in the same minute, so
// that ratios are more reliable than times. It exists so that every figure in the
// documents can be measured again.
//
// It needs root, nft and iptables, and works in its own network namespaces.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"time"

	"nft-masq-agent/nft/nfttest"

	"golang.org/x/sys/unix"
)

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer cancel()
	err := command(ctx)
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	case errors.As(err, new(usageError)):
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context) error {
	if len(os.Args) > 2 && os.Args[1] == launch {
		return launched(os.Args[2], os.Args[3:])
	}
	return run(ctx, os.Args[1:], os.Stdout, os.Stderr)
}

// settings select what is measured.
type settings struct {
	agent   string // path of the binary
	sizes   []int
	million bool
	rounds  int
	only    *regexp.Regexp
}

// A usageError is an error in the command line.
type usageError struct{ error }

func parse(args []string, stderr io.Writer) (settings, error) {
	var s settings
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&s.agent, "agent", "bin/nft-masq-agent", "`PATH` of the agent")
	sizes := fs.String("sizes", "10,1000,10000,100000", "numbers of CIDRs")
	fs.BoolVar(&s.million, "million", false, "also apply 1,000,000 CIDRs, from a ruleset (a minute more)")
	fs.IntVar(&s.rounds, "rounds", 7, "`NUMBER` of rounds")
	only := fs.String("only", "", "measure only the groups that match the `PATTERN`: "+strings.Join(groupNames(), ", "))
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return s, err
		}
		return s, usageError{err}
	}
	for word := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || n > 1_000_000 {
			return s, usageError{fmt.Errorf("sizes: %q is not a number from 1 to 1000000", word)}
		}
		s.sizes = append(s.sizes, n)
	}
	var err error
	if s.only, err = regexp.Compile(*only); err != nil {
		return s, usageError{fmt.Errorf("only: %w", err)}
	}
	switch {
	case s.rounds < 1:
		return s, usageError{errors.New("rounds: want at least 1")}
	case fs.NArg() > 0:
		return s, usageError{fmt.Errorf("unexpected argument %q", fs.Arg(0))}
	}
	return s, nil
}

// A bench is a run of the command.
type bench struct {
	settings
	report
	progress io.Writer
}

func (b *bench) add(r row) { b.Rows = append(b.Rows, r) }

// A group is a part of the table.
type group struct {
	name    string
	measure func(*bench, context.Context)
}

func groups() []group {
	return []group{
		{groupApply, (*bench).apply},
		{groupChange, (*bench).change},
		{groupPhases, (*bench).phases},
		{groupReads, (*bench).reads},
		{groupSwap, (*bench).swap},
		{groupPackets, (*bench).packets},
		{groupLookup, (*bench).lookup},
		{groupRules, (*bench).rules},
		{groupInvalid, (*bench).invalid},
		{groupBlocks, (*bench).blocks},
		{groupMemory, (*bench).memory},
		{groupRest, (*bench).atRest},
		{groupHealing, (*bench).healing},
		{groupTrace, (*bench).traced},
		{groupListener, (*bench).others},
		{groupBeside, (*bench).beside},
		{groupEvidence, (*bench).evidence},
		{groupInstead, (*bench).instead},
	}
}

func groupNames() (names []string) {
	for _, g := range groups() {
		names = append(names, strconv.Quote(g.name))
	}
	return names
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s, err := parse(args, stderr)
	if err != nil {
		return err
	}
	b := &bench{settings: s, progress: stderr}
	if err := b.describe(); err != nil {
		return err
	}
	for _, g := range groups() {
		if !s.only.MatchString(g.name) {
			continue
		}
		start := time.Now()
		_, _ = fmt.Fprintf(stderr, "%s …", g.name)
		if err := nfttest.Part(func() { g.measure(b, ctx) }); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
		_, _ = fmt.Fprintf(stderr, " %s\n", time.Since(start).Round(time.Second))
	}
	return b.report.write(stdout)
}
