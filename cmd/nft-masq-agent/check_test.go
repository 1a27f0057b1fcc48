package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
