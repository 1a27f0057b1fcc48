package main

import (
	"strings"
	"testing"
)

func TestStandardInputCanBeTheConfig(t *testing.T) {
	for _, args := range []string{
		"check --config -", "check --config /dev/stdin", "check -", "render -", "render --config -",
		"explain 10.1.2.3 --config -",
	} {
		for input, want := range map[string]int{"masqLinkLocal: true\n": exitDone, "masqLinkLocal: 5\n": exitFailed} {
			var out strings.Builder
			e := testEnvironment(t, &out, &out)
			e.stdin = strings.NewReader(input)
			if code := dispatch(t.Context(), testCommands(), strings.Fields(args), e); code != want ||
				want == exitFailed && !strings.Contains(out.String(), "standard input:1:16: ") {
				t.Errorf("%s, %q: exit code %d: %s", args, input, code, out.String())
			}
		}
	}
}
