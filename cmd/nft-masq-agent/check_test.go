package main

import (
	"bytes"
	"os"
	"path/filepath"
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
