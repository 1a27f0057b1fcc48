package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
)

// Exit codes.
const (
	exitDone   = 0 // done, valid, in sync
	exitFailed = 1 // failed, invalid, out of sync
	exitUsage  = 2 // wrong usage
)

// A command is a command of the program.
type command struct {
	name     string
	operands string // as in the usage: "ADDRESS"; optional ones in brackets
	about    string // one line
	details  string
	examples []string // at least one

	// tolerant means that everything from the first non-flag on is ignored, as by
	// the older agents, so that their command lines work.
	tolerant bool

	// flags declares the flags, and returns the action to run after parsing.
	flags func(fs *flag.FlagSet) action
}

// An action runs a command. It returns the exit code, or an error: a [usageError]
// leads to exit code 2, any other one to 1.
type action func(ctx context.Context, operands []string, e environment) (int, error)

// A usageError is an error in the command line.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

const program = "nft-masq-agent"

// dispatch runs the command named by the arguments and returns the exit code.
// Without a command, or if the first argument is a flag, it is run, because the
// older agents have no commands. A person who types the name alone gets the help,
// and next to a running agent the name alone is an error: a second one would
// overwrite its rules.
func dispatch(ctx context.Context, known []command, args []string, e environment) int {
	skipped, args := skipOlderName(args)
	if slices.Equal(args, []string{"--"}) { // the end of no flags
		args = nil
	}
	name := "run"
	implied := false
	switch {
	case len(args) == 0 && e.person:
		name = "help"
	case len(args) == 0:
		if pid, found := running.Agent(); found {
			_, _ = fmt.Fprintf(e.stderr, "%s: an agent already runs here (%s): name a command, such as status or "+
				"explain ADDRESS (%s help lists them); only the command run starts a second agent\n",
				program, running.Process(pid), program)
			return exitUsage
		}
		implied = true
	case asksForHelp(args[0]) && !slices.ContainsFunc(args[1:], isFlag):
		name = "help"
		args = args[1:]
	case isFlag(args[0]):
		implied = true
	default:
		name = args[0]
		args = args[1:]
	}
	c, err := find(known, name)
	if err != nil {
		_, _ = fmt.Fprintf(e.stderr, "%s: %v\n", program, err)
		return exitUsage
	}
	if c.name == "run" {
		// A log without a reader is not a reason to exit.
		signal.Ignore(unix.SIGPIPE)
		queue := newLineQueue(e.stderr)
		defer queue.Close(time.Second)
		e.stderr = queue
	}
	for _, name := range skipped {
		_, _ = fmt.Fprintf(e.stderr, "warning: the first argument %q is no command: it is skipped\n", name)
	}
	c.tolerant = implied
	e.command = c.name
	code, err := c.run(ctx, args, e)
	if err == nil {
		return code
	}
	e.fail(asksForJSON.MatchString(strings.Join(args, "\x00")), err)
	if errors.As(err, new(usageError)) {
		return exitUsage
	}
	return max(code, exitFailed)
}

// olderNames are the names of the older agents' programs. Command lines for an image
// without an entrypoint begin with one.
var olderNames = []string{"ip-masq-agent", "ip-masq-agent-v2", "non-masquerade-daemon"}

// skipOlderName returns the arguments without the first one, if that is empty or the name
// of an older agent's program, which those ignore.
func skipOlderName(args []string) (skipped, remaining []string) {
	if len(args) == 0 || isFlag(args[0]) { // the path of a config may end in such a name
		return nil, args
	}
	if args[0] == "" || slices.Contains(olderNames, path.Base(args[0])) {
		return args[:1], args[1:]
	}
	return nil, args
}

func isFlag(arg string) bool { return strings.HasPrefix(arg, "-") }

func asksForHelp(arg string) bool {
	return slices.Contains([]string{"-h", "-help", "--help"}, arg)
}

func find(known []command, name string) (command, error) {
	for _, c := range known {
		if c.name == name {
			return c, nil
		}
	}
	return command{}, fmt.Errorf("unknown command %q (%s help lists the commands)", name, program)
}

func (c command) run(ctx context.Context, args []string, e environment) (int, error) {
	fs, do := c.flagSet()
	version := fs.Bool("version", false, "print the version and exit")
	var operands []string
	var err error
	if c.tolerant {
		err = c.ignoreRest(fs, args, e)
	} else {
		operands, err = cli.Parse(fs, args)
	}
	if errors.Is(err, flag.ErrHelp) {
		return exitDone, write(e.stdout, c.help())
	}
	if err != nil {
		return exitUsage, usageError{flagError(err)}
	}
	if *version {
		return exitDone, cli.Print(e.stdout, false, build().Print)
	}
	wanted := strings.Fields(c.operands)
	if len(operands) > len(wanted) {
		return exitUsage, strayError(operands[len(wanted)])
	}
	if len(operands) < len(wanted) && !strings.HasPrefix(wanted[len(operands)], "[") {
		return exitUsage, usagef("%s is missing", wanted[len(operands)])
	}
	for _, w := range cli.Warnings(fs) {
		_, _ = fmt.Fprintf(e.stderr, "warning: %s\n", w)
	}
	return do(ctx, operands, e)
}

// ignoreRest parses flags up to the first non-flag. The older agents ignore what
// follows. It is an error if it cannot be meant for them: a command, or a flag
// that only this agent has.
func (c command) ignoreRest(fs *flag.FlagSet, args []string, e environment) error {
	if err := fs.Parse(args); err != nil || fs.NArg() == 0 {
		return err
	}
	ignored := fs.Args()
	if _, err := find(commands(), ignored[0]); err == nil {
		return fmt.Errorf("unexpected argument %q: a command comes before its flags", ignored[0])
	}
	for _, arg := range ignored {
		name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if isFlag(arg) && fs.Lookup(name) != nil && !cli.OfOlderAgents(name) {
			return strayError(ignored[0])
		}
	}
	_, _ = fmt.Fprintf(e.stderr,
		"warning: %q is not a flag: it and everything after it are ignored, as by the older agents: %q\n", ignored[0],
		ignored)
	return nil
}

func (c command) flagSet() (*flag.FlagSet, action) {
	fs := flag.NewFlagSet(c.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	return fs, c.flags(fs)
}

// oneDash matches long flags in errors of package flag.
var oneDash = regexp.MustCompile(`((?:for flag|for|argument:) )-([a-z][a-z0-9-]+)`)

// flagError writes flags with two dashes.
func flagError(err error) error {
	name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if unknown {
		return fmt.Errorf("unknown flag --%s", config.Printable(name))
	}
	return errors.New(oneDash.ReplaceAllString(err.Error(), "${1}--$2"))
}

func strayError(arg string) error {
	if _, err := strconv.ParseBool(arg); err == nil {
		return usagef("unexpected argument %q: boolean flags take =value, such as --enable-ipv6=%[1]s", arg)
	}
	return usagef("unexpected argument %q", arg)
}
