package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"regexp"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
)

// A response is what a command answers.
type response interface{ Begin() *cli.Head }

func printProblem(e environment, p config.Problem) {
	severity := ""
	if p.Level > config.Mistake {
		severity = p.Level.String() + ": "
	}
	_, _ = fmt.Fprintf(e.stderr, "%s%v\n", severity, p)
	if caret := p.Caret(); e.terminal && caret != "" {
		_, _ = fmt.Fprintln(e.stderr, caret)
	}
}

// reply prints an answer as JSON or as text, which is wrapped only on a terminal. Problems of
// the files are a part of the JSON, and go to stderr otherwise. The exit code is that of the
// errors.
func (e environment) reply(format string, r response, files ...config.Problem) (int, error) {
	var err error
	if format == outputJSON {
		r.Begin().Take(files)
		err = cli.JSON(e.stdout, r)
	} else {
		for _, p := range files {
			printProblem(e, p)
		}
		err = e.print(func(w *bufio.Writer) { _, _ = w.WriteString(r.(fmt.Stringer).String()) })
	}
	if err != nil || len(r.Begin().Errors)+len(config.Problems(files).Faults()) > 0 {
		return exitFailed, err
	}
	return exitDone, nil
}

// fail reports why a command failed: each problem of the files on a line that begins with its
// position and, on a terminal, followed by the line of the file. As JSON it is an answer.
func (e environment) fail(format string, err error) {
	problems := config.Problems{{ID: "failed", Msg: err.Error()}}
	see := ""
	if errors.As(err, new(usageError)) {
		problems[0].ID = "usage"
		see = fmt.Sprintf(" (see %s %s --help)", program, e.command)
	}
	files := errors.As(err, &problems)
	if format == outputJSON {
		h := cli.NewHead(e.command)
		h.Take(problems)
		_ = cli.JSON(e.stdout, h)
		return
	}
	if !files {
		_, _ = fmt.Fprintf(e.stderr, "%s %s: %v%s\n", program, e.command, err, see)
		return
	}
	for _, p := range problems {
		printProblem(e, p)
	}
}

// print prints long text output while it is written, wrapped only on a terminal.
func (e environment) print(text func(w *bufio.Writer)) error {
	if e.fit {
		var whole strings.Builder
		w := bufio.NewWriter(&whole)
		text(w)
		_ = w.Flush() // a Builder never fails
		return write(e.stdout, cli.Fit(whole.String()))
	}
	w := bufio.NewWriter(e.stdout)
	text(w)
	if err := w.Flush(); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// addOutput declares --output and its short form -o.
func addOutput(fs *flag.FlagSet, target *string) {
	cli.AddFlag(fs, target, "output", outputText, "text or json `FORMAT` of the answer", cli.OneOf(outputText,
		outputJSON))
	cli.AddFlag(fs, target, "o", outputText, "short for --output=`FORMAT`", cli.OneOf(outputText, outputJSON))
}

// Output formats.
const (
	outputText = "text"
	outputJSON = "json"
)

// asksForJSON finds -o json among arguments, which may be wrong ones.
var asksForJSON = regexp.MustCompile(`(^|\x00)--?(o|output)[=\x00]json(\x00|$)`)
