package nfnetlink_test

import (
	"testing"

	"nft-masq-agent/nft/nfnetlink"
)

func TestUnprintableNamesAreQuoted(t *testing.T) {
	for name, want := range map[string]string{
		"KUBE-POSTROUTING": "KUBE-POSTROUTING", "__set0": "__set0", "größe": "größe",
		"": `""`, "a b": `"a b"`, "a\nb": `"a\nb"`, "\x1b[2J": `"\x1b[2J"`, "\u009b1m": `"\u009b1m"`,
		"\u202eabc": `"\u202eabc"`, "a\x80": `"a\x80"`, `"`: `"\""`, `\n`: `"\\n"`, "\u00a0": `"\u00a0"`,
	} {
		if got := nfnetlink.Printable(name); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
}
