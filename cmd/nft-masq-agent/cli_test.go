package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

var update = flag.Bool("update", false, "regenerate the golden files in testdata/cli")

const cliDir = "../../testdata/cli"

// A transcript is a file of testdata/cli: text, files, and the output of command
// lines run next to them.
type transcript struct {
	intro string
	files []transcriptFile
	runs  []transcriptRun
}

type transcriptFile struct{ name, content string }

type transcriptRun struct {
	args string
	want result
}

// Prefixes of the lines that begin a part of a transcript.
const (
	filePart   = "-- file "
	runPart    = "-- run "
	stderrPart = "-- stderr"
	exitPart   = "-- exit "
)

func parseTranscript(t *testing.T, text string) transcript {
	t.Helper()
	var s transcript
	into := &s.intro
	for line := range strings.Lines(text) {
		head := strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(head, filePart):
			s.files = append(s.files, transcriptFile{name: head[len(filePart):]})
			into = &s.files[len(s.files)-1].content
		case strings.HasPrefix(head, runPart):
			s.runs = append(s.runs, transcriptRun{args: head[len(runPart):]})
			into = &s.runs[len(s.runs)-1].want.stdout
		case head == stderrPart:
			into = &s.runs[len(s.runs)-1].want.stderr
		case strings.HasPrefix(head, exitPart):
			if _, err := fmt.Sscan(head[len(exitPart):], &s.runs[len(s.runs)-1].want.code); err != nil {
				t.Fatal(err)
			}
		default:
			*into += line
		}
	}
	return s
}

func (s transcript) String() string {
	var b strings.Builder
	b.WriteString(s.intro)
	for _, f := range s.files {
		b.WriteString(filePart + f.name + "\n" + f.content)
	}
	for _, r := range s.runs {
		b.WriteString(runPart + r.args + "\n" + r.want.stdout)
		if r.want.stderr != "" {
			b.WriteString(stderrPart + "\n" + r.want.stderr)
		}
		if r.want.code != 0 {
			fmt.Fprintf(&b, "%s%d\n", exitPart, r.want.code)
		}
	}
	return b.String()
}

// play runs the command lines on a node, next to the files.
func (s transcript) play(t *testing.T, node *nfttest.NS,
	run func(t *testing.T, node *nfttest.NS, dir string, args ...string) result,
) transcript {
	t.Helper()
	dir := t.TempDir()
	for _, f := range s.files {
		path := filepath.Join(dir, f.name)
		nfttest.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		nfttest.NoError(t, os.WriteFile(path, []byte(f.content), 0o644))
	}
	played := transcript{intro: s.intro, files: s.files}
	for _, r := range s.runs {
		played.runs = append(played.runs, transcriptRun{r.args, run(t, node, dir, strings.Fields(r.args)...)})
	}
	return played
}

func TestCommandsMatchTheTranscripts(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob(filepath.Join(cliDir, "*.txt"))
	if err != nil || len(paths) == 0 {
		t.Fatal("no transcripts", err)
	}
	node := nodeOfTranscripts(t)
	for i, path := range paths {
		run := runProgram
		if i%6 > 0 {
			run = runInProcess
		}
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			t.Parallel()
			want, err := os.ReadFile(path)
			nfttest.NoError(t, err)
			got := parseTranscript(t, string(want)).play(t, node, run).String()
			if *update {
				nfttest.NoError(t, os.WriteFile(path, []byte(got), 0o644))
				return
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", path, diff)
			}
		})
	}
}

func TestAPersonWhoTypesTheNameAloneGetsTheHelp(t *testing.T) {
	var stdout strings.Builder
	e := environment{stdout: &stdout, stderr: &stdout, person: true}
	if code := dispatch(t.Context(), commands(), nil, e); code != exitDone || stdout.String() != programHelp(commands()) {
		t.Errorf("exit code %d: %s", code, stdout.String())
	}
	stdout.Reset()
	if dispatch(t.Context(), commands(), []string{"--v=2", "--help"}, e); stdout.String() != runCommand().help() {
		t.Errorf("with flags: %s", stdout.String())
	}
}

func TestRenderPrintsTheGoldenRulesets(t *testing.T) {
	dirs, err := filepath.Glob("../../testdata/cases/*")
	if err != nil || len(dirs) == 0 {
		t.Fatal("no cases", err)
	}
	for _, dir := range dirs {
		flags, err := os.ReadFile(filepath.Join(dir, "flags"))
		nfttest.NoError(t, err)
		for _, format := range [][]string{
			{"ruleset.nft"},
			{"ruleset.nft", "--mode=nftables", "--output=nft"},
			{"iptables.rules", "--mode=iptables-nft"},
			{"iptables.rules", "--output=iptables"},
		} {
			want, err := os.ReadFile(filepath.Join(dir, format[0]))
			needsNFTables := errors.Is(err, fs.ErrNotExist) && format[0] == "iptables.rules"
			if err != nil && !needsNFTables {
				t.Fatal(err)
			}
			args := append([]string{"render", "--config", filepath.Join(dir, "config.yaml")}, format[1:]...)
			var stdout, stderr strings.Builder
			e := testEnvironment(t, &stdout, &stderr)
			e.addresses = func() ([]netip.Addr, error) { return cases.Load(t, filepath.Base(dir)).Addresses, nil }
			exit := dispatch(t.Context(), commands(), append(args, strings.Fields(string(flags))...), e)
			got := result{stdout.String(), stderr.String(), exit}
			code := map[bool]int{false: exitDone, true: exitFailed}[needsNFTables]
			if diff := cmp.Diff(string(want), got.stdout); diff != "" || got.code != code ||
				needsNFTables != strings.Contains(got.stderr, "needs mode nftables") {
				t.Errorf("%s %v: exit code %d, %s (-want +got):\n%s", dir, format, got.code, got.stderr, diff)
			}
		}
	}
}
