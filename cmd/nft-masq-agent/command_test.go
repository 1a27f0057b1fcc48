package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
)

// toy is a command for tests.
func toy(name, operands string, do action) command {
	return command{name: name, operands: operands, about: "is a toy", flags: func(fs *flag.FlagSet) action {
		cli.AddRunFlags(fs)
		return do
	}}
}

func TestFirstArgumentSelectsTheCommand(t *testing.T) {
	var called string
	var operands []string
	name := func(n string) action {
		return func(_ context.Context, given []string, _ environment) (int, error) {
			called, operands = n, given
			return exitDone, nil
		}
	}
	all := []command{toy("run", "", name("run")), toy("explain", "ADDRESS", name("explain")), helpCommand()}
	tests := []struct {
		args     string
		called   string
		operands []string
		code     int
	}{
		{"", "run", nil, 0},
		{"run", "run", nil, 0},
		{"--v=2", "run", nil, 0},
		{"-v 2 --logtostderr", "run", nil, 0},
		{"--enable-ipv6 true --v=2", "run", nil, 0},
		{"--enable-ipv6 stray words -x --y=z", "run", nil, 0},
		{"--enable-ipv6 true takeover", "run", nil, 0},
		{"-- stray", "run", nil, 0},
		{"--enable-ipv6 explain x", "", nil, 2},
		{"-- explain", "", nil, 2},
		{"--enable-ipv6 true --takeover", "", nil, 2},
		{"--enable-ipv6 true -config=x", "", nil, 2},
		{"run --enable-ipv6 true", "", nil, 2},
		{"run --v=2", "run", nil, 0},
		{"explain x", "explain", []string{"x"}, 0},
		{"explain -v=2 x", "explain", []string{"x"}, 0},
		{"explain x -v=2", "explain", []string{"x"}, 0},
		{"explain -v 2 x --enable-ipv6", "explain", []string{"x"}, 0},
		{"explain -- -x", "explain", []string{"-x"}, 0},
		{"explain", "", nil, 2},
		{"explain x y", "", nil, 2},
		{"explain x -- y", "", nil, 2},
		{"run x", "", nil, 2},
		{"-v", "", nil, 2},
		{"nothing", "", nil, 2},
		{"explain --version", "", nil, 0},
		{"--help", "", nil, 0},
		{"-h", "", nil, 0},
		{"help explain", "", nil, 0},
		{"-h --v=2", "", nil, 0},
		{"-h explain --v=2", "", nil, 0},
		{"-h explain", "", nil, 0},
		{"--help explain", "", nil, 0},
		{"-h nothing", "", nil, 2},
		{"--v=2 --help", "", nil, 0},
	}
	for _, tt := range tests {
		called, operands = "", nil
		code := dispatch(t.Context(), all, strings.Fields(tt.args), environment{stdout: io.Discard, stderr: io.Discard})
		if code != tt.code || called != tt.called || !cmp.Equal(operands, tt.operands) {
			t.Errorf("%q: called %q with %q, code %d, want %q with %q, code %d",
				tt.args, called, operands, code, tt.called, tt.operands, tt.code)
		}
	}
}

func TestErrorsDetermineTheExitCode(t *testing.T) {
	for _, tt := range []struct {
		code int
		err  error
		want int
		says string
	}{
		{exitDone, nil, 0, ""},
		{exitFailed, nil, 1, ""},
		{exitDone, errors.New("broken"), 1, "nft-masq-agent run: broken\n"},
		{exitDone, usagef("wrong"), 2, "nft-masq-agent run: wrong (see nft-masq-agent run --help)\n"},
		{
			exitDone, fmt.Errorf("outer: %w", usagef("wrong")), 2,
			"nft-masq-agent run: outer: wrong (see nft-masq-agent run --help)\n",
		},
	} {
		var stderr strings.Builder
		do := func(context.Context, []string, environment) (int, error) { return tt.code, tt.err }
		code := dispatch(t.Context(), []command{toy("run", "", do)}, nil, environment{stdout: io.Discard, stderr: &stderr})
		if code != tt.want || stderr.String() != tt.says {
			t.Errorf("%d, %v: code %d and %q, want %d and %q", tt.code, tt.err, code, stderr.String(), tt.want, tt.says)
		}
	}
}

// An agent runs even if nothing reads its warnings. Of another command, all are written before it answers.
func TestOnlyRunQueuesItsWarnings(t *testing.T) {
	for _, name := range []string{"run", "toy"} {
		var stderr strings.Builder
		do := func(_ context.Context, _ []string, e environment) (int, error) {
			if _, queued := e.stderr.(*lineQueue); queued != (name == "run") {
				t.Errorf("%s: queued: %t", name, queued)
			}
			return exitDone, write(e.stderr, "second\n")
		}
		dispatch(t.Context(), []command{toy(name, "", do)}, []string{name, "--resync-interval=0"},
			environment{stdout: io.Discard, stderr: &stderr})
		const want = "warning: --resync-interval \"0\": is less than 1 s; 1 s is used\nsecond\n"
		if diff := cmp.Diff(want, stderr.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if !signal.Ignored(unix.SIGPIPE) {
		t.Error("run ends when nothing reads its log")
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestFailedOutputIsAFailure(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("")
	for _, args := range []string{
		"version", "help", "help check", "check --help", "check --version", "check -o json", "version -o json", "render",
		"render --output nft", "explain 10.1.2.3", "cleanup", "diff", "connections", "status",
	} {
		want := exitFailed
		if args == "diff" {
			want = exitUsage
		}
		if words := strings.Fields(args); words[0] != "version" && words[0] != "help" {
			args += " --config " + n.path
		}
		var stderr strings.Builder
		e := thisProcess(n.socket, nil, &stderr)
		e.stdout = fullDisk{}
		n.check(n.Do(func() error {
			code := dispatch(t.Context(), commands(), strings.Fields(args), e)
			says := strings.Contains(stderr.String(), ": output: no space left on device\n")
			if code != want || says == strings.Contains(args, "-o json") {
				t.Errorf("%s: exit code %d, want %d: %s", args, code, want, &stderr)
			}
			return nil
		}))
	}
}

func TestVersionIsPrintedByCommandAndFlag(t *testing.T) {
	want := runHere(t, "version")
	if want.code != exitDone || !strings.HasPrefix(want.stdout, "nft-masq-agent devel\ncommit ") ||
		!strings.Contains(want.stdout, "\ngo1.") {
		t.Errorf("version: %+v", want)
	}
	for _, args := range []string{
		"--version", "-version", "run --version", "check --version --strict",
		"--v=2 --version",
	} {
		if got := runHere(t, strings.Fields(args)...); got != want {
			t.Errorf("%s: %+v, want %+v", args, got, want)
		}
	}
	defer func() { version, commit = "", "" }()
	version, commit = "v1.2.3", "4d5e6f" // by the linker
	if got := runHere(t, "version"); !strings.HasPrefix(got.stdout, "nft-masq-agent v1.2.3\ncommit 4d5e6f\ngo1.") {
		t.Errorf("a release: %+v", got)
	}
}

func TestArgumentsOfRunAreWithoutItsName(t *testing.T) {
	defer func(was []string) { os.Args = was }(os.Args)
	for line, want := range map[string]string{
		"agent": "", "agent run": "", "agent run --v=2": "--v=2", "agent --v=2 run": "--v=2 run",
	} {
		os.Args = strings.Fields(line)
		if got := strings.Join(args(), " "); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}
