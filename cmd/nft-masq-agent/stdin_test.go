package main

import (
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
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

func TestCleanupRemovesOnlyWhatWasRequested(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("")
	nfttest.NFT(t, n.top.Node, staleChain, "-f", "-")
	before := n.kernelText()
	if got := n.run("cleanup", "--legacy", "--dry-run"); got.code != exitDone ||
		!strings.Contains(got.stdout, "would remove table inet nft-masq-agent\n") ||
		!strings.Contains(got.stdout, "would remove another agent's chain IP-MASQ") || n.kernelText() != before {
		t.Errorf("--dry-run: %+v", got)
	}
	if got := n.run("cleanup", "--legacy-only"); got.code != exitDone || strings.Contains(got.stdout, "inet") {
		t.Errorf("--legacy-only: %+v", got)
	}
	if text := n.kernelText(); strings.Contains(text, "IP-MASQ") || !strings.Contains(text, "table inet nft-masq-agent") {
		t.Errorf("after --legacy-only: %s", text)
	}
}
