package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTerminalOutputShowsTheLineOfTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c")
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
