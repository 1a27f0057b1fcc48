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

func TestErrorsNameFlagsWithTwoDashes(t *testing.T) {
	for args, want := range map[string]string{
		"explain 10.1.2.3 --from x":    "for flag --from: is not an IP address",
		"explain 10.1.2.3 --from":      "needs an argument: --from",
		"check --strict=maybe":         "for --strict",
		"check --output yaml":          "for flag --output: must be text or json",
		"monitor /etc/ip-masq-agent.x": "did you mean --config /etc/ip-masq-agent.x?",
	} {
		if got := runHere(t, strings.Fields(args)...); got.code != exitUsage || !strings.Contains(got.stderr, want) {
			t.Errorf("%s: %+v, want %q", args, got, want)
		}
	}
}
