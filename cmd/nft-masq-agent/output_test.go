package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
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

func TestNonRegularFileIsAnErrorInBothFormats(t *testing.T) {
	const says = "config: /dev/null: "
	got := runHere(t, "check", "--config", os.DevNull)
	if got.code != exitFailed || got.stdout != "" || !strings.HasPrefix(got.stderr, "nft-masq-agent check: "+says) {
		t.Errorf("text: %+v", got)
	}
	got = runHere(t, "check", "--config", os.DevNull, "-o", "json")
	var report answer.Check
	if err := json.Unmarshal([]byte(got.stdout), &report); err != nil || got.code != exitFailed || got.stderr != "" {
		t.Fatalf("json: %+v: %v", got, err)
	}
	if len(report.Errors) != 1 || report.Errors[0].ID != "config" || !strings.HasPrefix(report.Errors[0].Msg, says) ||
		report.Config.Accepted {
		t.Errorf("json: %+v", report)
	}
}
