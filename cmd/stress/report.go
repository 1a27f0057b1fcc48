package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"nft-masq-agent/cmd/stress/knownbad"
	"nft-masq-agent/nft/nfttest"
)

// A report is the result of a run, written as it progresses.
type report struct {
	out    io.Writer
	arrays bool

	flows    uint64 // of scenarios
	wrong    uint64
	failures []string
}

func (r *report) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(r.out, format+"\n", args...)
}

func (r *report) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.failures = append(r.failures, text)
	r.printf("FAILED: %s", text)
}

func (r *report) begin(now time.Time) error {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	r.printf("Linux %s, %d processors, %s, %s", bytes.TrimSpace(release), runtime.NumCPU(), runtime.GOARCH,
		now.UTC().Format(time.DateOnly))
	return err
}

// looksUpInArrays reports whether nf_tables, which must be loaded, looks up
// addresses in sorted arrays. The release does not show this, because such
// changes are backported.
func looksUpInArrays() (bool, error) {
	symbols, err := os.ReadFile("/proc/kallsyms")
	return bytes.Contains(symbols, []byte(" nft_array_")), err
}

// overtime is how long a scenario may exceed its duration.
const overtime = 3 * time.Minute

// bench runs fn on a new node.
func (r *report) bench(ctx context.Context, s settings, fn func(context.Context, *bench)) (*bench, nfttest.Tally,
	error,
) {
	b, err := openBench(s.agent)
	if err != nil {
		return nil, nfttest.Tally{}, err
	}
	b.until = time.Now().Add(s.each)
	ctx, cancel := context.WithDeadline(ctx, b.until.Add(overtime))
	defer cancel()
	err = nfttest.Part(func() { fn(ctx, b) })
	var tally nfttest.Tally
	if b.hammer != nil {
		var stopErr error
		tally, stopErr = b.hammer.Stop()
		err = errors.Join(err, stopErr)
	}
	return b, tally, errors.Join(err, b.close())
}

// scenarios repeats the selected scenarios until there were enough connections.
func (r *report) scenarios(ctx context.Context, s settings) {
	r.printf("\n%-46s %8s %9s %6s %6s  %s", "what happens to the agent", "updates", "flows", "WRONG", "LEAK",
		"besides")
	for turn := 0; turn == 0 || r.flows < s.flows; turn++ {
		before := r.flows
		for _, sc := range scenarios() {
			if s.only.MatchString(sc.name) && ctx.Err() == nil {
				r.scenario(ctx, s, sc)
			}
		}
		if r.flows == before || len(r.failures) > 0 {
			return
		}
	}
	r.printf("%-46s %8s %9d %6d", "in total", "", r.flows, r.wrong)
}

func (r *report) scenario(ctx context.Context, s settings, sc scenario) {
	b, tally, err := r.bench(ctx, s, sc.do)
	if err != nil {
		r.fail("%s: after %s: %v", sc.name, tally, err)
		return
	}
	wronged, leaked := tally.Wronged()-b.away.Wronged(), tally.Leaked()-b.away.Leaked()
	besides := b.note
	if len(b.away.Counts) > 0 {
		besides = fmt.Sprintf("while rules were missing %d flows, %d WRONG, %d LEAK", b.away.Seen(), b.away.Wronged(),
			b.away.Leaked())
	}
	flows := tally.Seen() - b.away.Seen()
	r.printf("%-46s %8d %9d %6d %6d  %s", sc.name, b.updates, flows, wronged, leaked, besides)
	r.flows += flows
	r.wrong += wronged + leaked + b.away.Wronged()
	if wronged+leaked+b.away.Wronged() > 0 {
		r.fail("%s: connections with a wrong source", sc.name)
	}
	if tally.Dropped > 0 {
		r.fail("%s: conntrack dropped %d packets, so this proves nothing", sc.name, tally.Dropped)
	}
}

// recipes runs the recipes that are known to be wrong.
func (r *report) recipes(ctx context.Context, s settings) {
	var err error
	if r.arrays, err = looksUpInArrays(); err != nil {
		r.fail("%v", err)
	}
	r.printf("\n%-60s %8s %9s %6s %6s", "known to be wrong", "updates", "flows", "WRONG", "LEAK")
	for i, recipe := range knownbad.Recipes() {
		// The control is part of every run.
		if i == 0 || s.only.MatchString(recipe.Name) && ctx.Err() == nil {
			r.recipe(ctx, s, recipe)
		}
	}
	r.byHand(ctx, s)
}

func (r *report) recipe(ctx context.Context, s settings, bad knownbad.Recipe) {
	seen := func(t nfttest.Tally) bool { return t.Wronged() > 0 || !bad.ComesAndGoes && t.Leaked() > 0 }
	must := bad.Shows(r.arrays)
	b, tally, err := r.bench(ctx, s, func(ctx context.Context, b *bench) {
		b.try(ctx, bad, func() bool { return !must || seen(b.hammer.SoFar()) })
	})
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		r.fail("%s: %v", bad.Name, err)
		return
	}
	leaked := fmt.Sprint(tally.Leaked())
	if bad.ComesAndGoes {
		leaked = "-"
	}
	verdict := ""
	if !seen(tally) {
		verdict = "  not distinguishable on this kernel"
	}
	r.printf("%-60s %8d %9d %6d %6s%s", bad.Name, b.updates, tally.Seen(), tally.Wronged(), leaked, verdict)
	if must && !seen(tally) {
		r.fail("%s: wrong packets were expected here but not seen: this run proves nothing", bad.Name)
	}
}

// end prints the result.
func (r *report) end(s settings) (clean bool) {
	if r.flows < s.flows {
		r.fail("%d connections, fewer than %d", r.flows, s.flows)
	}
	if len(r.failures) > 0 {
		r.printf("\nFAILED:\n  %s", strings.Join(r.failures, "\n  "))
		return false
	}
	r.printf("\nclean: %d connections, %d wrong", r.flows, r.wrong)
	return true
}
