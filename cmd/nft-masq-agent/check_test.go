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
