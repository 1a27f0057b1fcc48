package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
)

// Output formats.
const (
	outputText = "text"
	outputJSON = "json"
)

// addOutput declares --output and its short form -o.
func addOutput(fs *flag.FlagSet, target *string) {
	addFormats(fs, target, outputText, outputText, outputJSON)
}

func addFormats(fs *flag.FlagSet, target *string, otherwise string, formats ...string) {
	usage := strings.Join(formats, " or ") + " `FORMAT` of the answer"
	cli.AddFlag(fs, target, "output", otherwise, usage, cli.OneOf(formats...))
	cli.AddFlag(fs, target, "o", otherwise, "short for --output=`FORMAT`", cli.OneOf(formats...))
}

// asksForJSON finds -o json among arguments, which may be wrong ones.
var asksForJSON = regexp.MustCompile(`(^|\x00)--?(o|output)[=\x00]json(\x00|$)`)

// reply prints an answer as JSON or as text, which is wrapped only on a terminal. Problems of
// the files are a part of the JSON, and go to stderr otherwise. The exit code is that of the
// errors.
func (e environment) reply(format string, a cli.Answer, files ...config.Problem) (int, error) {
	var err error
	if format == outputJSON {
		a.Begin().Take(files)
		err = cli.JSON(e.stdout, a)
	} else {
		e.printProblems(files)
		err = cli.Print(e.stdout, e.fit, a.Print)
	}
	if err != nil || len(a.Begin().Errors)+len(config.Problems(files).Faults()) > 0 {
		return exitFailed, err
	}
	return exitDone, nil
}

// fail reports why a command failed: each problem of the files on a line that begins with its
// position. As JSON it is an answer.
func (e environment) fail(asJSON bool, err error) {
	problems := config.Problems{{ID: "failed", Msg: err.Error()}}
	see := ""
	if errors.As(err, new(usageError)) {
		problems[0].ID = "usage"
		see = fmt.Sprintf(" (see %s %s --help)", program, e.command)
	}
	files := errors.As(err, &problems)
	switch {
	case asJSON:
		h := cli.NewHead(e.command)
		h.Take(problems)
		_ = cli.JSON(e.stdout, h)
	case files:
		e.printProblems(problems)
	default:
		_, _ = fmt.Fprintf(e.stderr, "%s %s: %v%s\n", program, e.command, err, see)
	}
}

// printProblems prints problems of the files.
func (e environment) printProblems(problems config.Problems) {
	for _, p := range problems {
		severity := ""
		if p.Level > config.Mistake {
			severity = p.Level.String() + ": "
		}
		_, _ = fmt.Fprintf(e.stderr, "%s%v\n", severity, p)
	}
}

// write prints the whole output, so that a full disk or a closed pipe is an error
// instead of a success with partial output.
func write(w io.Writer, text string) error {
	if _, err := io.WriteString(w, text); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}
