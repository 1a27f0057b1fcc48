package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
)

// refuse prints the problems of the files, each on a line that begins with its
// position and, on a terminal, followed by the line of the file.
func refuse(e environment, err error) (int, error) {
	var problems config.Problems
	if !errors.As(err, &problems) {
		return exitFailed, err
	}
	for _, p := range problems {
		printProblem(e, "", p)
	}
	return exitFailed, nil
}

func printProblem(e environment, severity string, p config.Problem) {
	_, _ = fmt.Fprintf(e.stderr, "%s%v\n", severity, p)
	if caret := p.Caret(); e.terminal && caret != "" {
		_, _ = fmt.Fprintln(e.stderr, caret)
	}
}

// warn prints the warnings of the files to stderr.
func warn(e environment, l options.Loaded) {
	for _, p := range l.Problems.Remarks() {
		printProblem(e, p.Level.String()+": ", p)
	}
}

// reply prints an answer as JSON or as text, which is wrapped only on a terminal.
func (e environment) reply(format string, v any, text func() string) error {
	if format == outputJSON {
		s, err := answer.JSON(v)
		if err != nil {
			return err
		}
		return write(e.stdout, s)
	}
	return e.print(func(w *bufio.Writer) { _, _ = w.WriteString(text()) })
}

// print prints long text output while it is written, wrapped only on a terminal.
func (e environment) print(text func(w *bufio.Writer)) error {
	if e.fit {
		var whole strings.Builder
		w := bufio.NewWriter(&whole)
		text(w)
		_ = w.Flush() // a Builder never fails
		return write(e.stdout, answer.Fit(whole.String()))
	}
	w := bufio.NewWriter(e.stdout)
	text(w)
	if err := w.Flush(); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// addOutput declares --output and its short form -o.
func addOutput(fs *flag.FlagSet, to *string) {
	options.AddFlag(fs, to, "output", outputText, "text or json `FORMAT` of the answer", options.OneOf(outputText,
		outputJSON))
	options.AddFlag(fs, to, "o", outputText, "short for --output=`FORMAT`", options.OneOf(outputText, outputJSON))
}

// Output formats.
const (
	outputText = "text"
	outputJSON = "json"
)
