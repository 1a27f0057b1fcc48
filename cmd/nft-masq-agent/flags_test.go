package main

import (
	"flag"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
)

func parseRun(t *testing.T, line string) *options.Options {
	t.Helper()
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	o := options.AddRunFlags(fs)
	if err := fs.Parse(strings.Fields(line)); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return o
}

func TestRejectedFlagValuesExitWithCode2(t *testing.T) {
	tests := []string{
		"--logtostderr=perhaps", "--v=1.5", "--masq-chain=-x", "--masq-chain=!x", "--to-ports=0",
		"--to-ports=1024-2047,", "--to-ports=0-0", "--resync-interval=1.5", "--resync-interval=99999999999999999999",
		"--http-address=127.0.0.1:70000",
		"--http-address=http://x:1", "--mode=legacy",
	}
	for _, arg := range tests {
		if got := runHere(t, "run", arg); got.code != exitUsage || got.stdout != "" || got.stderr == "" {
			t.Errorf("%s: %+v", arg, got)
		}
	}
}

func TestFlagHelpFitsEightyColumns(t *testing.T) {
	for _, c := range commands() {
		fs, _ := c.flagSet()
		text := c.help()
		fs.VisitAll(func(f *flag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s: --%s has no help", c.name, f.Name)
			}
			if !options.IsKlogFlag(f.Name) && !strings.Contains(text, "-"+f.Name) {
				t.Errorf("%s: --%s is missing in the help", c.name, f.Name)
			}
		})
		if !strings.Contains(text, "For example:\n  "+program) {
			t.Errorf("%s: no example in the help", c.name)
		}
		for line := range strings.Lines(text) {
			if len(line) > 81 && !strings.HasPrefix(line, "  "+program) {
				t.Errorf("%s: %d columns: %s", c.name, len(line)-1, line)
			}
		}
	}
}

// policyFlags returns the flags of all commands that use a policy.
func policyFlags(withKlog bool) (names []string) {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	options.AddPolicyFlags(fs)
	fs.VisitAll(func(f *flag.Flag) {
		if withKlog || !options.IsKlogFlag(f.Name) {
			names = append(names, f.Name)
		}
	})
	return names
}

func TestPolicyCommandsAcceptAllPolicyFlags(t *testing.T) {
	for _, c := range commands() {
		if slices.Contains([]string{"version", "ready", "help"}, c.name) {
			continue
		}
		fs, _ := c.flagSet()
		for _, name := range policyFlags(true) {
			if fs.Lookup(name) == nil {
				t.Errorf("%s has no --%s", c.name, name)
			}
		}
	}
}
