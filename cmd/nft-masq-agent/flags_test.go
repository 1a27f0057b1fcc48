package main

import (
	"flag"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
)

func TestFlagHelpFitsEightyColumns(t *testing.T) {
	for _, c := range commands() {
		fs, _ := c.flagSet()
		if fs.Output() != io.Discard {
			t.Errorf("%s: package flag prints its own errors", c.name)
		}
		text := c.help()
		fs.VisitAll(func(f *flag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s: --%s has no help", c.name, f.Name)
			}
			listed := strings.Contains(text, "-"+f.Name)
			shared := slices.Contains(policyFlags(true), f.Name)
			if !listed && (!shared || c.name == "run" && !cli.IsKlogFlag(f.Name)) {
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
	cli.AddPolicyFlags(fs)
	fs.VisitAll(func(f *flag.Flag) {
		if withKlog || !cli.IsKlogFlag(f.Name) {
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

func TestEachWrongFlagIsOneLineThatNamesIt(t *testing.T) {
	// What these take as it is: a path, a name, or "" for what is off or the default.
	anything := []string{"config", "probe-socket"}
	mayBeEmpty := []string{"http-address", "to-ports", "probe-socket"}
	for _, c := range commands() {
		fs, _ := c.flagSet()
		rejected := func(what, name string, args ...string) {
			t.Helper()
			if strings.HasPrefix(c.operands, "ADDRESS") {
				args = append([]string{"192.0.2.9"}, args...)
			}
			args = append([]string{c.name}, args...)
			got := runHere(t, args...)
			if got.code != exitUsage || got.stdout != "" || strings.Count(got.stderr, "\n") != 1 ||
				!strings.HasPrefix(got.stderr, program+" "+c.name+": ") || !strings.Contains(got.stderr, name) {
				t.Errorf("%s: %q: %+v", what, args, got)
			}
		}
		rejected("unknown", "--nothing", "--nothing")
		rejected("unknown", "-x", "-x=1")
		fs.VisitAll(func(f *flag.Flag) {
			dashed := "--" + f.Name
			if len(f.Name) == 1 {
				dashed = "-" + f.Name
			}
			if cli.IsKlogFlag(f.Name) {
				return
			}
			is, ok := f.Value.(interface{ IsBoolFlag() bool })
			if ok = ok && is.IsBoolFlag(); !ok {
				rejected("no value", dashed, dashed)
			}
			if !slices.Contains(anything, f.Name) {
				rejected("wrong value", dashed, dashed+"=!?")
			}
			if !slices.Contains(mayBeEmpty, f.Name) {
				rejected("empty", dashed, dashed+"=")
			}
			rejected("misspelled", dashed, dashed+"s=1")
			rejected("three dashes", dashed, "-"+dashed+"=1")
		})
	}
}

func TestWrongUsageIsOneLineThatNamesTheFlagWithTwoDashes(t *testing.T) {
	for args, want := range map[string]string{
		"cleanup --legacy --legacy-only":                     "--legacy",
		"connections --yes":                                  "--yes",
		"connections --seen-as 192.0.2.9:0":                  "is not an IP address",
		"explain 192.0.2.9 --from fd00::1":                   "--from",
		"check ./a --config ./b":                             "--config",
		"diff ./a ./b --config ./c":                          "--config",
		"diff - --output text -":                             "standard input can be one of the files",
		"ready --alive --wait-for 192.0.2.1:1":               "--wait-for",
		"render file --config file":                          `"file" and --config both name the config: omit one`,
		"cleanup --probe-socket " + strings.Repeat("x", 108): "has at most 107",
		"explain 10.1.2.3 --from 127.0.0.1":                  "is not the source of a packet to another host or pod",
		"run --logtostderr=perhaps":                          "--logtostderr",
		"run --masq-chain=!x":                                "--masq-chain",
		"run --to-ports=0-0":                                 "--to-ports",
		"run --resync-interval=99999999999999999999":         "--resync-interval",
		"run --http-address=127.0.0.1:70000":                 "--http-address",
		"explain 10.1.2.3 --from x":                          "for flag --from: is not an IP address",
		"explain 10.1.2.3 --from":                            "needs an argument: --from",
		"check --strict=maybe":                               "for --strict",
		"check --output yaml":                                "for flag --output: must be text or json",
	} {
		got := runHere(t, strings.Fields(args)...)
		if got.code != exitUsage || got.stdout != "" || strings.Count(got.stderr, "\n") != 1 ||
			!strings.Contains(got.stderr, want) {
			t.Errorf("%s: %+v", args, got)
		}
	}
}

// A command lists its own flags. Those of all commands are listed by run alone, to which one line of the others points.
func TestOnlyTheHelpOfRunListsSharedFlags(t *testing.T) {
	const heading = "\nFlags of all commands that read the config:\n"
	for _, c := range commands() {
		fs, _ := c.flagSet()
		own, shared, found := strings.Cut(c.help(), heading)
		if found != (c.name == "run") {
			t.Errorf("%s: heading: %t", c.name, found)
		}
		pointers := strings.Count(c.help(), program+" help run.\n")
		if want := fs.Lookup("config") != nil && c.name != "run"; pointers > 1 || (pointers == 1) != want {
			t.Errorf("%s: points to the help of run %d times:\n%s", c.name, pointers, c.help())
		}
		for _, name := range policyFlags(false) {
			line := regexp.MustCompile("(?m)^  --" + name + "( |$)")
			if line.MatchString(own) || line.MatchString(shared) != found {
				t.Errorf("%s: --%s:\n%s", c.name, name, c.help())
			}
		}
		if fs.Lookup("output") != nil && strings.Count(c.help(), "  -o, --output ") != 1 {
			t.Errorf("%s: --output:\n%s", c.name, c.help())
		}
	}
}
