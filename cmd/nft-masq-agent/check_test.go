package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

// An environment without functions panics when the node is read.
func TestCheckReadsNothingButTheFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	text := "masqueradeSrcInterfaces: [nosuch*]\nmasqueradeOutInterfaces: [nosuch0]\nsnatAddresses: [198.51.100.11]\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	code := dispatch(t.Context(), commands(), []string{"check", "--strict", "--config", path},
		environment{stdout: &stdout, stderr: &stderr})
	if code != exitDone || stderr.Len() > 0 {
		t.Errorf("exit code %d: %s%s", code, &stdout, &stderr)
	}
}

func TestExamplesHaveNoWarnings(t *testing.T) {
	dirs, err := filepath.Glob(filepath.Join(root, "manifests/examples/*/"))
	if err != nil || len(dirs) == 0 {
		t.Fatal(dirs, err)
	}
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "config"))
		if err != nil || len(files) == 0 || filepath.Base(dir) == "non-masquerade-daemon" { // linkLocal is deprecated
			continue
		}
		var stdout, stderr bytes.Buffer
		code := dispatch(t.Context(), commands(), []string{"check", "--strict", files[0]},
			environment{stdout: &stdout, stderr: &stderr})
		if code != exitDone || stderr.Len() > 0 {
			t.Errorf("%s: exit code %d: %s%s", dir, code, &stdout, &stderr)
		}
	}
}

func TestStandardInputCanBeTheConfig(t *testing.T) {
	for _, args := range []string{
		"check --config -", "check --config /dev/stdin", "check -", "render -", "render --config -",
		"explain 10.1.2.3 --config -",
	} {
		for input, want := range map[string]int{"masqLinkLocal: true\n": exitDone, "masqLinkLocal: 5\n": exitFailed} {
			var out strings.Builder
			e := testEnvironment(t, &out, &out)
			e.stdin = strings.NewReader(input)
			var code int
			onNode(t, func() { code = dispatch(t.Context(), commands(), strings.Fields(args), e) })
			if code != want ||
				want == exitFailed && !strings.Contains(out.String(), "standard input:1:16: ") {
				t.Errorf("%s, %q: exit code %d: %s", args, input, code, out.String())
			}
		}
	}
}

func TestTerminalOutputShowsTheLineOfTheFile(t *testing.T) {
	path, empty := filepath.Join(t.TempDir(), "c"), filepath.Join(t.TempDir(), "empty")
	nfttest.Check(os.WriteFile(empty, nil, 0o644))
	var notes strings.Builder
	e := testEnvironment(t, io.Discard, &notes)
	e.terminal = true
	dispatch(t.Context(), commands(), []string{"render", empty}, e)
	if strings.Count(notes.String(), "\n") != 1 {
		t.Errorf("of an empty file: %q", notes.String())
	}
	if err := os.WriteFile(path, []byte("nonMasqueradeCIDRs:\n  - 10.0.0.1/8\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	message := path + `:2:5: "10.0.0.1/8" has host bits set: write "10.0.0.0/8"` + "\n"
	for terminal, want := range map[bool]string{
		false: message,
		true:  message + "  - 10.0.0.1/8\n    ^\n",
	} {
		var stderr strings.Builder
		e := testEnvironment(t, io.Discard, &stderr)
		e.terminal = terminal
		dispatch(t.Context(), commands(), []string{"check", "--config", path}, e)
		if diff := cmp.Diff(want, stderr.String()); diff != "" {
			t.Errorf("terminal %t (-want +got):\n%s", terminal, diff)
		}
	}
}
